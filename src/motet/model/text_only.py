"""Bases whose class wraps a language model together with towers for images or sound: without them it reads text alone."""

from __future__ import annotations

from typing import Any


def decoder_of(model: Any) -> Any:
    """The decoder of a causal language model, however many classes wrap it."""
    decoder = model.get_decoder()
    if decoder is model:  # some do not say where it is
        return model.model
    return decoder if getattr(decoder, "get_decoder", lambda: decoder)() is decoder else decoder_of(decoder)


def without_towers(config: Any) -> Any:
    """The class that a checkpoint was saved from, as one that makes no towers but names them; None where it has none.

    The language model keeps the paths that it has there, by which servers find what an adapter changes.
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

    # transformers reads in the module's source what a class can do
    return type(name, (whole,), {"__init__": make, "__module__": whole.__module__})
