"""The models that the demo can start from, each as a Hugging Face directory."""

import shutil
from pathlib import Path

from ...schemas.errors import RollstreamError
from .games import vocabulary
from .plan import Plan


def make_model(plan: Plan, directory: Path) -> Path:
    """Make or copy the plan's model. Raises `MissingExtra`, `RollstreamError` for a directory that is none."""
    from ...infra.models import export_smollm2, tiny_llama
    from ...infra.tokenizers import word_tokenizer

    if plan.model == "tiny":
        words = vocabulary()
        tiny_llama(directory, vocabulary=len(words), context=128, seed=plan.seed)
        word_tokenizer(words).save_pretrained(directory)
    elif plan.model == "smollm2":
        export_smollm2(directory)
    elif (Path(plan.model) / "config.json").is_file():
        shutil.copytree(plan.model, directory, dirs_exist_ok=True)
    else:
        raise RollstreamError(
            f"--model: expected tiny, smollm2 or a Hugging Face directory with a config.json, found {plan.model!r}"
        )
    return directory
