"""Loading a Hugging Face folder into CPU memory: its causal LM and its tokeniser; nothing is fetched.

Specs name folders, so transformers is imported only where one is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from pydantic import BeforeValidator

from flowrl.errors import BindError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

Folder = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]


def load_causal_lm(folder: str, with_head: bool = True) -> PreTrainedModel:
    """The causal LM of a Hugging Face folder, in float32 on the CPU; nothing is fetched.

    Raises:
        BindError: there is no such folder, it does not load, or it lacks weights (which would be drawn at random).
    """
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    with loading(folder), quiet():
        lm, report = load(folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    missing = {name for name in report["missing_keys"] if with_head or not _is_head(lm, name)}
    if problems := sorted(missing | {str(key) for key in report["mismatched_keys"]}):
        raise BindError(
            f"the folder {folder!r} lacks {len(problems)} weights of {type(lm).__name__} or has them in another shape "
            f"({', '.join(problems[:3])}{', …' if len(problems) > 3 else ''}), and they would be drawn at random; "
            f"write the folder again with model.save_pretrained(folder)."
        )
    return cast("PreTrainedModel", lm)


def stored_dtype(folder: str) -> str | None:
    """The dtype that a folder's config.json names for its weights; float32 where it names none, and None where there
    is no such file."""
    path = Path(folder, "config.json")
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    named = (part.get(key) for part in (config, config.get("text_config") or {}) for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, named), "float32"))


@contextmanager
def quiet() -> Iterator[None]:
    """transformers shows no progress bars in the block: they would tear those of the run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def loading(folder: str) -> Iterator[None]:
    """Whatever goes wrong in the block is laid to the folder.

    Raises:
        BindError: there is no such folder, or the block raised.
    """
    _refuse_no_folder(folder)
    try:
        yield
    except Exception as error:
        raise BindError(
            f"the folder {folder!r} does not load as a causal LM ({type(error).__name__}: {error}); expected "
            f"config.json and whole safetensors of a causal LM, as model.save_pretrained(folder) writes them."
        ) from error


def load_tokenizer(folder: str) -> Any:
    """The tokeniser of a Hugging Face folder.

    Raises:
        BindError: the folder has none that loads.
    """
    from transformers import AutoTokenizer

    _refuse_no_folder(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise BindError(
            f"the folder {folder!r} has no tokeniser that loads ({type(error).__name__}: {error}); it is written "
            f"beside the trained weights, so add it with tokenizer.save_pretrained(folder)."
        ) from error


def _refuse_no_folder(folder: str) -> None:
    if not os.path.isfile(os.path.join(folder, "config.json")):
        found = "has no config.json" if os.path.isdir(folder) else "does not exist"
        raise BindError(
            f"the model folder {folder!r} {found}; expected a local Hugging Face folder of a causal LM. Write one with "
            f"model.save_pretrained(folder) and tokenizer.save_pretrained(folder), or download one beforehand."
        )


def _is_head(lm: PreTrainedModel, name: str) -> bool:
    head = lm.get_output_embeddings()
    return head is not None and any(lm.get_parameter(name) is parameter for parameter in head.parameters())
