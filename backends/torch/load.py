"""Load the causal LM and the tokenizer of a Hugging Face folder into CPU memory. No code of the folder runs.

Specs name folders or repositories of the Hub, so transformers is imported only when one is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

import torch
from pydantic import BeforeValidator
from safetensors import safe_open
from torch import Tensor

from flowrl.backends.torch.probes import Attention
from flowrl.data.text.tokenizer import TOKENIZERS
from flowrl.errors import BindError, why_not_loaded
from flowrl.hub.models import folder_of, metadata
from flowrl.hub.models import model as download_model
from flowrl.hub.repositories import Commits, is_commit, is_repository, refuse_revision, resolve
from flowrl.protocols.backend import Backend
from flowrl.sync.weight_selection import sent_bytes

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

Folder = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


class FolderBackend(Backend):
    """Base of backends whose engines start with the weights of a Hugging Face folder, or of a repository of the Hub.

    Args:
        model: the folder, or the name of a repository, such as ``"Qwen/Qwen3-0.6B"``; None uses the weights of the role
            ``actor``.
        revision: a branch, tag or commit of the repository; None is the default branch.
    """

    imports: ClassVar[tuple[str, ...]] = (
        "transformers.models.auto.modeling_auto",
        TOKENIZERS,
        "transformers.models.llama.modeling_llama",  # imports what all architectures share
    )

    model: Folder | None
    revision: str | None = dataclasses.field(default=None, kw_only=True)

    @property
    def starts_from(self) -> str | None:
        """The model's folder; of a repository that this machine has no files of, its name."""
        return self.model if self.model is None or self.commit is None else str(folder_of(self.model, self.revision))

    @property
    def commit(self) -> str | None:
        """``org/name@commit`` of a repository that is resolved."""
        return f"{self.model}@{self.revision}" if is_commit(self.revision) and self._repository else None

    @property
    def synced_bytes(self) -> int | None:
        """The bytes of the folder's weights in the engine's dtype; None for a repository without files on this
        machine."""
        folder = self.starts_from
        if folder is None or is_repository(folder):
            return None
        with ExitStack() as files:
            shapes = {name: part.get_shape() for name, part in stored_tensors(folder, files).items()}
        return sent_bytes(shapes, getattr(torch, self.synced_dtype))

    @property
    def synced_dtype(self) -> str:
        """See `Backend.synced_dtype`."""
        named = getattr(self, "dtype", None) or "float32"
        return "bfloat16" if named == "auto" else str(named)

    @property
    def _repository(self) -> str | None:
        """The repository that `model` names; None for a folder."""
        return self.model if self.model is not None and is_repository(self.model) else None

    def pinned(self, commits: Commits) -> Self:
        """With the commit as `revision`; its configuration and tokenizer are then on this machine.

        Raises:
            HubError: see `flowrl.hub.models.metadata`; or a folder is given a revision.
        """
        if self._repository is None:
            refuse_revision(self.model, self.revision)
            return self
        commit = commits.resolve(self._repository, self.revision)
        metadata(self._repository, commit)
        return dataclasses.replace(cast(Any, self), revision=commit)  # type: ignore[no-any-return]

    def local(self) -> Self:
        """With the folder of a repository's files as `model`.

        Raises:
            HubError: see `flowrl.hub.models.model`.
        """
        if (repository := self._repository) is None:
            return self
        folder = download_model(repository, resolve(repository, self.revision))
        return dataclasses.replace(cast(Any, self), model=str(folder), revision=None)  # type: ignore[no-any-return]

    @property
    def shares(self) -> str | None:
        """The role whose weights the engine uses, in the same process."""
        return "actor" if self.model is None else None

    def refuse_missing(self) -> None:
        """Refuse a folder without a model; a repository that is not resolved is not checked.

        Raises:
            BindError: see `refuse_no_model`.
        """
        folder = self.starts_from
        if folder is not None and not is_repository(folder):
            self.refuse_folder(folder)

    def refuse_folder(self, folder: str) -> None:
        """Refuse a folder that has no model of this kind; reads no weights."""
        refuse_no_model(folder)


def load_causal_lm(folder: str, with_head: bool = True, attention: Attention | None = None) -> PreTrainedModel:
    """The causal LM of a Hugging Face folder, in float32 on the CPU.

    Without `with_head`, the folder may lack the head; for `attention` see `skeleton`.
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
            ignore_mismatched_sizes=True,  # refused below, by name
            **_LOCAL,
        )
    missing = {name for name in report["missing_keys"] if with_head or not _is_head(lm, name)}
    fix = "Write the folder again with model.save_pretrained(folder)."
    misshaped = {f"{name}: {tuple(found)}, not {tuple(due)}" for name, found, due in report["mismatched_keys"]}
    if problems := sorted(missing | misshaped):
        raise BindError(
            f"The model folder {folder!r} lacks {len(problems)} weights of {type(lm).__name__} or has them in another "
            f"shape ({_some(problems)}); transformers would initialize them at random. {fix}",
            code="model.missing-weights",
            path=folder,
            missing=problems,
            architecture=type(lm).__name__,
        )
    if problems := sorted(without_use(report["unexpected_keys"], with_head)):
        raise BindError(
            f"The model folder {folder!r} has {len(problems)} weights that {type(lm).__name__} does not have according "
            f"to config.json ({_some(problems)}). Correct config.json, for example its number of layers. {fix}",
            code="model.unexpected-weights",
            path=folder,
            unexpected=problems,
            architecture=type(lm).__name__,
        )
    refuse_not_finite(lm, folder)
    return cast("PreTrainedModel", lm)


@torch.no_grad()
def mix_weights(lm: PreTrainedModel, received: dict[str, Tensor], alpha: float = 1.0) -> None:
    """Set the weights of a model to ``alpha * received + (1 - alpha) * own``; `received` are all, in its dtype."""
    slots = lm.state_dict()
    if not received.keys() <= slots.keys():  # some are stored fused (experts): load them as a folder is loaded
        loaded: Any = type(lm).from_pretrained(None, config=lm.config, state_dict=received, dtype=lm.dtype)
        received = loaded.state_dict()
    for name, tensor in received.items():
        if alpha == 1.0 or not slots[name].is_floating_point():
            slots[name].copy_(tensor)
        else:
            slots[name].lerp_(tensor.to(slots[name].device), alpha)


def without_use(unexpected: Collection[str], with_head: bool) -> set[str]:
    """Weights of a folder that the causal LM lacks, except those that are left out on purpose: a critic often starts
    from a reward model, and leaves out its head (``score``) as it does that of an LM."""
    return {name for name in unexpected if with_head or not name.startswith("score.")}


def skeleton(folder: str, attention: Attention | None = None, auto: Any = None, **changes: Any) -> PreTrainedModel:
    """The model of a Hugging Face folder without its weights: on the meta device, buffers included.

    Args:
        attention: the attention implementation; None is transformers' choice (fused if the architecture declares
            support), but plain if an architecture is built for only one, so that they cannot be compared.
        auto: transformers' class that selects the architecture; None is that of causal LMs.
        changes: entries of ``config.json`` to replace.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **_LOCAL, **changes)
    build: Any = (auto or AutoModelForCausalLM).from_config
    with torch.device("meta"):
        lm: PreTrainedModel = build(config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False)
        if attention is None and lm.config._attn_implementation != "eager" and not lm._can_set_attn_implementation():
            return skeleton(folder, "eager", auto, **changes)
    return lm


def refuse_not_finite(lm: PreTrainedModel, folder: str) -> None:
    """Refuse weights that are NaN or infinite; of shards, those of this rank. Raises `BindError`."""

    def broken(tensor: Any) -> bool:
        if not isinstance(tensor, Tensor):  # modules of megatron-core have states that are not
            return False
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return local.is_floating_point() and local.device.type != "meta" and not bool(local.isfinite().all())

    if names := [name for name, tensor in lm.state_dict().items() if broken(tensor)]:
        raise BindError(
            f"The model folder {folder!r} has NaN or infinity in {len(names)} weights of {type(lm).__name__} "
            f"({_some(names)}); its files are damaged, or its training diverged. Use another copy of the model.",
            code="model.not-finite",
            path=folder,
            weights=names,
        )


def _some(names: Collection[str]) -> str:
    return f"{', '.join(list(names)[:3])}{', …' if len(names) > 3 else ''}"


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars, which would break those of the run, and its reports of missing or unexpected
    weights, which this module checks."""
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


def stored_files(folder: str, files: ExitStack) -> Iterator[tuple[str, Any]]:
    """The safetensors files of `folder` that transformers reads, by name, each open as long as `files` is."""
    names, index = [WEIGHTS], os.path.join(folder, INDEX)
    if not os.path.isfile(os.path.join(folder, WEIGHTS)):
        names = []
        if os.path.isfile(index):
            with open(index, encoding="utf-8") as lines:
                names = sorted(set(json.load(lines)["weight_map"].values()))
    for name in names:
        yield name, files.enter_context(safe_open(os.path.join(folder, name), framework="pt"))


def stored_tensors(folder: str, files: ExitStack) -> dict[str, Any]:
    """Lazy slices of the safetensors of `folder` by name, valid as long as `files` is open."""
    return {key: file.get_slice(key) for _, file in stored_files(folder, files) for key in file.keys()}  # noqa: SIM118


@contextmanager
def loading(folder: str, what: str = "a causal LM") -> Iterator[None]:
    """Re-raise errors in the block as `BindError`, naming the folder, which must contain `what`."""
    refuse_no_model(folder)
    try:
        yield
    except BindError:
        raise
    except Exception as error:
        raise BindError(
            f"The model folder {folder!r} does not load as {what} ({why_not_loaded(error)}); expected a "
            f"config.json and complete safetensors of {what}. Write them with model.save_pretrained(folder).",
            code="model.not-loadable",
            path=folder,
            expected=what,
            error=type(error).__name__,
        ) from error


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a Hugging Face folder; raises `BindError` if it or ``config.json`` does not load."""
    from transformers import AutoConfig, AutoTokenizer

    refuse_no_model(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception as error:
        with loading(folder):  # config.json names the tokenizer's class, so it may be what is broken
            AutoConfig.from_pretrained(folder, **_LOCAL)
        raise BindError(
            f"The tokenizer in the model folder {folder!r} does not load ({why_not_loaded(error)}). Add it "
            f"with tokenizer.save_pretrained(folder); training also writes it with the weights.",
            code="tokenizer.cannot-load",
            path=folder,
            error=type(error).__name__,
        ) from error


def refuse_no_model(folder: str) -> None:
    """Refuse a folder without a model: it does not exist, or has no ``config.json`` that is a JSON object. Raises
    `BindError`."""
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
    is_run = os.path.isfile(os.path.join(folder, "run.json"))
    trained = sorted(str(path.parent) for path in Path(folder).glob("*/config.json")) if is_run else []
    fix = (
        f"It is the folder of a run; pass that of a model in it: {', '.join(map(repr, trained))}."
        if trained
        else "Pass the name of a repository of the Hub ('org/name'), or write the folder with "
        "model.save_pretrained(folder) and tokenizer.save_pretrained(folder)."
    )
    raise BindError(
        f"The model folder {folder!r} {found}; expected a Hugging Face folder of a causal LM. {fix}",
        code="model.not-found",
        path=folder,
        found=found,
    )


def _is_head(lm: PreTrainedModel, name: str) -> bool:
    """Whether a weight belongs to the head alone; a tied one belongs to the body too."""
    return lm.get_submodule(name.rpartition(".")[0]) is lm.get_output_embeddings()
