"""The cookbook's preference learning on a file of pairs: python cookbook_preferences.py MODEL PAIRS LOG"""

import sys

from tinker_cookbook.preference import train_dpo  # type: ignore[import-not-found]
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons  # type: ignore[import-not-found]
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl  # type: ignore[import-not-found]
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig  # type: ignore[import-not-found]

model, pairs, log = sys.argv[1:]
RENDERER = "qwen3_instruct"
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=256, batch_size=8
)
train_dpo.main(
    train_dpo.Config(
        log_path=log,
        model_name=model,
        recipe_name="pairs",
        renderer_name=RENDERER,
        dataset_builder=DPODatasetBuilderFromComparisons(
            common_config=common, comparison_builder=ComparisonBuilderFromJsonl(train_path=pairs)
        ),
        learning_rate=1e-3,
        dpo_beta=0.1,
        lora_rank=8,
        max_steps=6,
        eval_every=0,
        save_every=0,
    )
)
