"""Loading a Hugging Face folder into CPU memory: its causal LM and its tokeniser. Nothing is fetched, and no code of
the folder is run.

Specs name folders, so transformers is imported only where one is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import torch
from pydantic import BeforeValidator
from safetensors import safe_open
from torch import Tensor

from flowrl.backends.torch.probes import Attention
from flowrl.data.text.tokenizer import TOKENIZERS
from flowrl.errors import BindError
from flowrl.protocols.backend import Backend

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

Folder = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


class FolderBackend(Backend):
    """Base of backends whose engines start with the weights of a Hugging Face folder.

    Args:
        model: the folder; None uses the weights of the role ``actor``.
    """

    imports: ClassVar[tuple[str, ...]] = (
        "transformers.models.auto.modeling_auto",
        TOKENIZERS,
        "transformers.models.llama.modeling_llama",  # which imports what models of all kinds share
    )

    model: Folder | None

    @property
    def starts_from(self) -> str | None:
        """The model's folder."""
        return self.model

    @property
    def shares(self) -> str | None:
        """The role in whose processes the engine lives, since it uses its weights."""
        return "actor" if self.model is None else None

    def refuse_missing(self) -> None:
        """Refuse a folder that holds no model.

        Raises:
            BindError: see `refuse_no_model`.
        """
        if self.model is not None:
            refuse_no_model(self.model)


def load_causal_lm(folder: str, with_head: bool = True, attention: Attention | None = None) -> PreTrainedModel:
    """The causal LM of a Hugging Face folder, in float32 on the CPU.

    Args:
        folder: where it is.
        with_head: whether its head is wanted; without, the folder may lack it.
        attention: see `skeleton`.

    Raises:
        BindError: there is no such folder, it does not load; it lacks weights (which would be drawn at random) or has
            others (which would be left out); or a weight is NaN or infinite.
    """
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    with loading(folder), quiet():
        chosen = skeleton(folder, attention).config._attn_implementation
        lm, report = load(
            folder,
            dtype=torch.float32,
            attn_implementation=chosen,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **_LOCAL,
        )
    missing = {name for name in report["missing_keys"] if with_head or not _is_head(lm, name)}
    fix = "write the folder again with model.save_pretrained(folder)."
    misshaped = {f"{name}: {tuple(found)}, not {tuple(due)}" for name, found, due in report["mismatched_keys"]}
    if problems := sorted(missing | misshaped):
        raise BindError(
            f"the folder {folder!r} lacks {len(problems)} weights of {type(lm).__name__} or has them in another shape "
            f"({_some(problems)}), and they would be drawn at random; {fix}"
        )
    if problems := sorted(without_use(report["unexpected_keys"], with_head)):
        raise BindError(
            f"the folder {folder!r} holds {len(problems)} weights that {type(lm).__name__} does not have by its "
            f"config.json ({_some(problems)}), and they would be left out; correct config.json (its number of layers, "
            f"say), or {fix}"
        )
    refuse_not_finite(lm, folder)
    return cast("PreTrainedModel", lm)


def without_use(unexpected: Collection[str], with_head: bool) -> set[str]:
    """Of the weights that a folder has and a causal LM has not, those that nobody would leave out on purpose.

    A critic often starts from a reward model, and leaves out its head (``score``) as it does that of an LM.
    """
    return {name for name in unexpected if with_head or not name.startswith("score.")}


def skeleton(folder: str, attention: Attention | None = None, auto: Any = None) -> PreTrainedModel:
    """The model of a Hugging Face folder without its weights: on the meta device, buffers included.

    Args:
        folder: where it is.
        attention: what computes attention; None is transformers' choice (fused where the architecture says that it
            can), but plain where an architecture is built for one or the other, so that they cannot be compared.
        auto: the class of transformers that chooses among architectures; None is that of causal LMs.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **_LOCAL)
    build: Any = (auto or AutoModelForCausalLM).from_config
    with torch.device("meta"):
        lm: PreTrainedModel = build(config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False)
        if attention is None and lm.config._attn_implementation != "eager" and not lm._can_set_attn_implementation():
            return skeleton(folder, "eager", auto)
    return lm


def refuse_not_finite(lm: PreTrainedModel, folder: str) -> None:
    """Refuse weights that are NaN or infinite; of shards, those of this rank.

    Raises:
        BindError: some are.
    """

    def broken(tensor: Tensor) -> bool:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local.is_floating_point() and local.device.type != "meta" and not bool(local.isfinite().all())

    if names := [name for name, tensor in lm.state_dict().items() if broken(tensor)]:
        raise BindError(
            f"the folder {folder!r} holds NaN or infinity in {len(names)} weights of {type(lm).__name__} "
            f"({_some(names)}); expected finite numbers: its files are damaged, or its training diverged. Take another "
            f"copy."
        )


def _some(names: Collection[str]) -> str:
    return f"{', '.join(list(names)[:3])}{', …' if len(names) > 3 else ''}"


@contextmanager
def quiet() -> Iterator[None]:
    """transformers shows no progress bars in the block, which would tear those of the run; nor what it finds missing
    or unexpected in a folder: that is judged here."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def stored_tensors(folder: str, files: ExitStack) -> dict[str, Any]:
    """What the safetensors of `folder` hold: lazy slices by name, for as long as `files` is open."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as lines:
            names = sorted(set(json.load(lines)["weight_map"].values()))
    else:
        names = [name for name in ("model.safetensors",) if os.path.isfile(os.path.join(folder, name))]
    stored: dict[str, Any] = {}
    for name in names:
        file = files.enter_context(safe_open(os.path.join(folder, name), framework="pt"))
        stored |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    return stored


@contextmanager
def loading(folder: str, what: str = "a causal LM") -> Iterator[None]:
    """Whatever goes wrong in the block is laid to the folder, which is to hold `what`.

    Raises:
        BindError: there is no such folder, or the block raised.
    """
    refuse_no_model(folder)
    try:
        yield
    except BindError:
        raise
    except Exception as error:
        raise BindError(
            f"the folder {folder!r} does not load as {what} ({type(error).__name__}: {error}); expected "
            f"config.json and whole safetensors of {what}, as model.save_pretrained(folder) writes them."
        ) from error


def load_tokenizer(folder: str) -> Any:
    """The tokeniser of a Hugging Face folder.

    Raises:
        BindError: the folder has none that loads, or a ``config.json`` that does not.
    """
    from transformers import AutoConfig, AutoTokenizer

    refuse_no_model(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception as error:
        with loading(folder):  # config.json says which class the tokeniser is of, so that may be what is broken
            AutoConfig.from_pretrained(folder, **_LOCAL)
        raise BindError(
            f"the folder {folder!r} has no tokeniser that loads ({type(error).__name__}: {error}); it is written "
            f"beside the trained weights, so add it with tokenizer.save_pretrained(folder)."
        ) from error


def refuse_no_model(folder: str) -> None:
    """Refuse a folder that holds no model at all.

    Raises:
        BindError: there is no such folder, no ``config.json`` in it, or one that is not a JSON object.
    """
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as config:
            if isinstance(json.load(config), dict):
                return
        found = "has a config.json that is not an object"
    except FileNotFoundError:
        found = "has no config.json" if os.path.isdir(folder) else "does not exist"
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        found = f"has a config.json that is not JSON ({error})"
    raise BindError(
        f"the model folder {folder!r} {found}; expected a local Hugging Face folder of a causal LM. Write one with "
        f"model.save_pretrained(folder) and tokenizer.save_pretrained(folder), or download one beforehand."
    )


def _is_head(lm: PreTrainedModel, name: str) -> bool:
    """Whether a weight is stored for the head alone; one that is tied to it is of the body too."""
    return lm.get_submodule(name.rpartition(".")[0]) is lm.get_output_embeddings()
