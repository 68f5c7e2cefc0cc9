"""`TorchRewardModel`: a frozen sequence classifier of transformers, which scores whole responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from flowrl.backends.torch.load import Folder, loading, skeleton, stored_tensors
from flowrl.backends.torch.on_mesh import MeshBackend
from flowrl.backends.torch.probes import Attention, Inputs, known, relative_error, tolerance
from flowrl.backends.torch.score.engine import Residence, Resident
from flowrl.backends.torch.score.model import Dtype, TorchModel
from flowrl.backends.torch.score.rows import Budget, TokenInputs, last_of, score_rows
from flowrl.data.segments import refuse_segments
from flowrl.data.text.tokenizer import ChatTokenizer, positions
from flowrl.errors import BindError, DataError
from flowrl.protocols.footprint import Demand, Footprint
from flowrl.protocols.protocols import BuildContext, Sleeper
from flowrl.protocols.scorers import RewardScorer, TextRewardScorer
from flowrl.records import Tokens


class TorchRewardModel(MeshBackend):
    """A frozen reward model: `AutoModelForSequenceClassification` of a decoder, as TRL and most libraries train them.

    The score of a row equals transformers' for the row alone, without padding: the logit of a label at the last token
    that is not the configuration's pad token.

    Args:
        model: a Hugging Face folder, with a tokenizer to score text.
        label: the label whose logit is the score; None if there is only one.
        normalize: subtract the ``mean`` of the folder's ``config.json`` from scores, and divide by its ``std``, as
            OpenRLHF does with the reward models that it trained.
        head: ``"random"`` initializes the head of a folder without one, from the seed of the run, for experiments.
        dtype: the body's arithmetic: ``"bfloat16"`` is autocast over float32 weights. The head is in float32.
        attention: as in `TorchScorer`.
        max_tokens: positions that one forward pass may compute; see `flowrl.backends.torch.train.learner.TrainedSpec`.
        device: None is CUDA if available, else the CPU.
        memory: GiB that the role takes on a device, in place of the prediction; compared with ``memory=`` of a place.
        ranks, mesh: processes that share the weights; see `flowrl.backends.torch.train.learner.TrainedSpec`.
        offload: keep weights in CPU memory; a layer moves to the device to compute.
    """

    serves = (RewardScorer, TextRewardScorer, Sleeper)

    model: Folder
    label: int | None = Field(default=None, ge=0)
    normalize: bool = Field(default=False, kw_only=True)
    head: Literal["stored", "random"] = "stored"
    dtype: Dtype = "float32"
    attention: Attention | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    device: str | None = None
    memory: float | None = Field(default=None, gt=0)
    ranks: int = Field(default=1, ge=1)
    offload: bool = False

    def refuse_folder(self, folder: str) -> None:
        """Refuse a folder without a reward model or without such a label; reads no weights."""
        super().refuse_folder(folder)
        refuse_label(classifier := classifier_of(folder), folder, self.label)
        if self.normalize:
            moments_of(classifier, folder)

    def footprint(self, demand: Demand) -> Footprint:
        """See `Backend.footprint`."""
        from flowrl.backends.torch.sizing.training import Engine  # here, since it runs the model

        return Engine(self, demand, None).scored(shares=False)

    def build(self, context: BuildContext) -> TorchRewardModelEngine:
        """Load body and head.

        Raises:
            BindError: the folder has no complete sequence classifier of a decoder; it has several labels and `label`
                is None; or this process is not one of `ranks`.
        """
        classifier = classifier_of(self.model)
        refuse_label(classifier, self.model, self.label)
        mesh = self.join(context)
        body = TorchModel(self.model, self.dtype, mesh, self.attention, gradient_checkpointing=False, with_head=False)
        body.module.requires_grad_(False)
        head = head_of(self.model, classifier, self.head, context.seed).to(mesh.device).requires_grad_(False)
        residence = Residence(mesh.device, [body.gathered.root, head], offload=self.offload)
        budget = body.budget(self.max_tokens)
        moments = moments_of(classifier, self.model) if self.normalize else (0.0, 1.0)
        engine = TorchRewardModelEngine(self.model, body, head, self.label or 0, budget, residence, moments)
        engine.refuse_other_classifier(classifier)
        return engine


def moments_of(classifier: Any, folder: str) -> tuple[float, float]:
    """Mean and std of the scores, in the configuration of a classifier. Raises `BindError` if it has none."""
    mean, std = (getattr(classifier.config, name, None) for name in ("mean", "std"))
    if not isinstance(mean, int | float) or not isinstance(std, int | float) or not std > 0:
        raise BindError(
            f"{folder}/config.json has mean={mean!r} and std={std!r}, expected numbers by which scores are "
            f"normalized, std above 0. Write them there, or leave normalize=True out.",
            code="model.no-moments",
            folder=folder,
            mean=mean,
            std=std,
        )
    return float(mean), float(std)


def classifier_of(folder: str, **changes: Any) -> Any:
    """The sequence classifier of a folder without its weights, with these `changes` to its configuration. Raises
    `BindError` if transformers has none for this architecture, or it is not a decoder."""
    from transformers import AutoModelForSequenceClassification

    with loading(folder, "a sequence classifier"):
        classifier: Any = skeleton(folder, None, AutoModelForSequenceClassification, **changes)
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        raise BindError(
            f"The model folder {folder!r} contains a {type(classifier).__name__}, which does not score a sequence by a "
            f"linear head on its last token. Bind a decoder, such as a LlamaForSequenceClassification.",
            code="model.not-a-reward-model",
            path=folder,
            architecture=type(classifier).__name__,
        )
    return classifier


def refuse_label(classifier: Any, folder: str, label: int | None) -> None:
    """Refuse a label that the classifier lacks, or none of several. Raises `BindError`."""
    names, count = classifier.config.id2label, classifier.num_labels
    if (label is None and count > 1) or (label is not None and label >= count):
        problem = "none is selected" if label is None else f"label={label} is not one of them"
        raise BindError(
            f"The reward model in {folder!r} has {count} labels ({', '.join(f'{i}: {n}' for i, n in names.items())}), "
            f"but {problem}. Select the one that is the score: TorchRewardModel(folder, label={count - 1}).",
            code="model.label",
            path=folder,
            label=label,
            labels=tuple(names.values()),
        )


def head_of(folder: str, classifier: Any, head: str, seed: int) -> nn.Linear:
    """The head of a folder, or a random one, on the CPU."""
    shape, bias = tuple(classifier.score.weight.shape), classifier.score.bias is not None
    with ExitStack() as files:
        stored = stored_tensors(folder, files)
        found = {name: stored[f"score.{name}"] for name in ("weight", "bias") if f"score.{name}" in stored}
        if bool(found) != (head == "stored"):
            raise BindError(
                f"The model folder {folder!r} has a head (score.weight). Leave head='random' out."
                if found
                else f"The model folder {folder!r} has no head (score.weight in safetensors). Bind a trained reward "
                f"model, or TorchRewardModel(folder, head='random') for an experiment with a random head.",
                code="model.reward-head",
                path=folder,
                head=head,
            )
        state = {name: tensor[:].float() for name, tensor in found.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linear = nn.Linear(shape[1], shape[0], bias=bias)
    if state:
        expected = {name: tuple(tensor.shape) for name, tensor in linear.state_dict().items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != expected or not all(tensor.isfinite().all() for tensor in state.values()):
            raise BindError(
                f"The head in {folder!r} has the shapes {shapes} or numbers that are not finite; expected finite "
                f"numbers and {expected} according to config.json. Write the folder again with "
                f"model.save_pretrained(folder).",
                code="model.reward-head",
                path=folder,
                found=shapes,
                expected=expected,
            )
        linear.load_state_dict(state)
    return linear


class TorchRewardModelEngine(Resident):
    """A live `RewardScorer` and `TextRewardScorer`; made by `TorchRewardModel.build`.

    `head` is ``[labels width]``, unsharded; `label` is the one whose logit is the score.
    """

    def __init__(
        self,
        folder: str,
        body: TorchModel,
        head: nn.Linear,
        label: int,
        budget: Budget,
        residence: Residence,
        moments: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.folder, self.residence = folder, residence
        self._mean, self._std = moments
        self._body, self._head, self._label, self._budget = body, head, label, budget
        config = body.module.config.get_text_config()
        self._pad, self._longest = config.pad_token_id, getattr(config, "max_position_embeddings", None)

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer and template for text; raises `DataError` if the folder has none."""
        return ChatTokenizer(self.folder)

    @torch.no_grad()
    def rewards(self, batch: Tokens) -> Tensor:
        """The score of each row, prompt and response together: float32 ``[batch]``.

        A collective: each rank passes any number of its own rows, and gets their scores.
        """
        return self._rewards(batch, "rewards")

    @torch.no_grad()
    def rewards_of(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> Tensor:
        """The score of each conversation by the model's template, without truncation: float32 ``[conversations]``."""
        with self._body.mesh.all_or_none("rewards_of"):
            ids, mask = self.tokenizer.pad_left([self.tokenizer.conversation_ids(each) for each in conversations])
        if not conversations:
            ids, mask = ids.new_zeros(0, 1), mask.new_zeros(0, 1)
        nothing = torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.bool)
        return self._rewards(TokenInputs(ids, mask, positions(mask), nothing), "rewards_of")

    def _rewards(self, batch: Tokens, call: str) -> Tensor:
        self.residence.require_awake(call)
        with self._body.mesh.all_or_none(call):
            self._refuse_too_long(batch.attention_mask)
            inputs = self._last_tokens(TokenInputs.of(batch, self._body.vocabulary))
        return (score_rows(self._body.mesh, inputs, self._budget, self._scores).sum(1) - self._mean) / self._std

    def _scores(self, batch: Tokens) -> Tensor:
        def score(states: Tensor) -> Tensor:
            with torch.autocast(self._body.device.type, enabled=False):
                return self._logits(states.float())[:, self._label]

        return self._body.score_states(batch, score)

    def _logits(self, states: Tensor) -> Tensor:
        """The logits of all labels: ``[tokens labels]``."""
        return cast(Tensor, self._head(states))

    def _last_tokens(self, batch: TokenInputs) -> TokenInputs:
        """The rows with only their last token under the mask, which here covers the whole sequence."""
        refuse_segments(batch.attention_mask, batch.position_ids, f"The reward model in {self.folder!r}")
        read = batch.attention_mask.bool()
        counted = read if self._pad is None else read & (batch.input_ids != self._pad)
        counted = torch.where(counted.any(1, keepdim=True), counted, read)
        last = last_of(counted)
        ids, mask, place = (nn.functional.pad(x, (0, 1)) for x in (batch.input_ids, read, batch.position_ids))
        return TokenInputs(ids, mask, place, last)

    def _refuse_too_long(self, attention_mask: Tensor) -> None:
        lengths = attention_mask.sum(1)
        if self._longest is not None and len(lengths) and int(lengths.max()) > self._longest:
            row = int(lengths.argmax())
            raise DataError(
                f"Row {row} has {int(lengths[row])} tokens, but the reward model in {self.folder!r} has positions for "
                f"{self._longest}; flowrl never truncates, since the score is that of the last token. Lower "
                f"max_new_tokens, or bind a reward model with more positions.",
                code="model.too-long",
                row=row,
                found=int(lengths[row]),
                expected=self._longest,
            )

    def refuse_other_classifier(self, classifier: Any) -> None:
        """Raise `BindError` if the model's own class, `classifier` without weights, scores a probe differently."""
        setattr(classifier, classifier.base_model_prefix, self._body.module)
        classifier.score = self._head

        def classify(probe: Inputs) -> Tensor:
            logits = cast(Tensor, classifier(**known(classifier, probe)).logits[:, self._label])
            return (logits - self._mean) / self._std

        theirs = self._body.probe(classify)
        ids = torch.arange(8)[None] % self._body.vocabulary
        read = torch.ones_like(ids, dtype=torch.bool)
        ours = self.rewards(TokenInputs(ids, read, positions(read), read[:, 1:] & False))
        bound = tolerance(self._body.dtype)
        if not (distance := relative_error(ours.to(theirs.device), theirs)) <= bound:
            raise BindError(
                f"The {type(classifier).__name__} in {self.folder!r} does not score a sequence by its head on the last "
                f"token: a probe differs by {distance:.2g} (expected at most {bound:g}). Bind another reward model.",
                code="model.not-a-reward-model",
                path=self.folder,
                architecture=type(classifier).__name__,
                distance=distance,
            )
