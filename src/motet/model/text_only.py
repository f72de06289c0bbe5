"""Bases that combine a language model with towers for images or sound; they are loaded without towers, for text only."""

from __future__ import annotations

from typing import Any


def decoder_of(model: Any) -> Any:
    """The decoder of a causal language model, below any number of wrapping classes."""
    decoder = model.get_decoder()
    if decoder is model:  # classes that do not name their decoder
        return model.model
    return decoder if getattr(decoder, "get_decoder", lambda: decoder)() is decoder else decoder_of(decoder)


def without_towers(config: Any) -> Any:
    """A subclass of the checkpoint's class that drops its towers and lists them in `towers`; None for text models.

    The language model's paths do not change, because servers find the layers of an adapter by path.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    name = next(iter(config.architectures or ()), "")
    if name != MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type):
        return None
    whole = getattr(transformers, name)

    def make(self: Any, config: Any) -> None:
        whole.__init__(self, config)
        decoder = decoder_of(self)
        self.towers = []
        around = [module for module in self.modules() if any(each is decoder for each in module.modules())]
        for parent in around:
            for child_name, child in list(parent.named_children()):
                if isinstance(child, transformers.PreTrainedModel) and child not in around:
                    self.towers.append(type(child).__name__)
                    setattr(parent, child_name, None)

    # transformers reads the source of a class's module to detect its features
    return type(name, (whole,), {"__init__": make, "__module__": whole.__module__})
