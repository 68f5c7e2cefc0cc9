"""`TorchRewardTrainer`: a reward model that is trained, on the body of a causal LM or of a reward model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast

from torch import Tensor, nn

from flowrl.backends.torch.load import load_tokenizer, stored_tensors
from flowrl.backends.torch.optimizers.specs import AdamW, Optimizer
from flowrl.backends.torch.score.blocks import blocks_of
from flowrl.backends.torch.score.engine import Residence, TrainedEngine
from flowrl.backends.torch.score.model import TorchModel, scatter
from flowrl.backends.torch.score.reward_model import TorchRewardModelEngine, classifier_of, head_of
from flowrl.backends.torch.score.rows import Budget, Rows, TokenInputs, check_tokens, last_of
from flowrl.backends.torch.train.learner import Learner, TrainedSpec
from flowrl.backends.torch.train.mesh import Gathered
from flowrl.errors import BindError
from flowrl.protocols.protocols import BuildContext, Checkpointed, Objective, Sleeper
from flowrl.protocols.scorers import RewardTrainer, TextRewardScorer
from flowrl.sync.buckets import BUCKET_BYTES


class TorchRewardTrainer(TrainedSpec):
    """A trained reward model: a sequence classifier of transformers with one label, float32 weights, one optimizer step
    per mini-batch.

    It starts from a reward model, or from a causal LM such as a policy after supervised fine-tuning, whose body gets a
    random head, by the seed of the run. `TorchRewardModel` and transformers load the folder that it writes, and give
    the same scores. If the configuration has no pad token, it gets that of the tokenizer, since transformers scores the
    last token that is not padding.

    Args:
        model, optimizer, schedule, grad_clip, dtype, attention, gradient_checkpointing, max_tokens, device, memory,
            ranks, mesh, offload, reshard_after_forward: see `TrainedSpec`; the default optimizer is ``AdamW(lr=1e-5)``.
    """

    serves = (RewardTrainer, TextRewardScorer, Checkpointed, Sleeper)

    optimizer: Optimizer = AdamW(lr=1e-5)

    def refuse_folder(self, folder: str) -> None:
        """Refuse a folder without a decoder, or of a classifier with several labels; reads no weights."""
        super().refuse_folder(folder)
        _classifier(folder)

    def build(self, context: BuildContext) -> TorchRewardTrainerEngine:
        """Load body, head and tokenizer, and build the optimizer.

        Raises:
            BindError: the folder has no complete body of a decoder or no tokenizer; it is a classifier with several
                labels; or this process is not one of `ranks`.
        """
        self.optimizer.require_installed()
        classifier, trained = _classifier(self.model)
        mesh, tokenizer = self.join(context), load_tokenizer(self.model)
        body = TorchModel(self.model, self.dtype, mesh, self.attention, self.gradient_checkpointing, with_head=False)
        for config in (classifier.config.get_text_config(), body.module.config.get_text_config()):
            if config.pad_token_id is None:
                config.pad_token_id = tokenizer.pad_token_id
        stored = trained or _has_head(self.model)  # OpenRLHF's configurations name a class of its own
        head = head_of(self.model, classifier, "stored" if stored else "random", context.seed).to(mesh.device)
        engine = TorchRewardTrainerEngine(self.model, body, head, 0, body.budget(self.max_tokens), tokenizer)
        engine.refuse_other_classifier(classifier)
        engine.train(classifier, self)
        return engine


def _classifier(folder: str) -> tuple[Any, bool]:
    """The classifier of a folder with one label, without its weights, and whether the folder has its head. Raises
    `BindError`."""
    classifier = classifier_of(folder)
    trained = any(name.endswith("ForSequenceClassification") for name in classifier.config.architectures or ())
    if not trained:
        return classifier_of(folder, num_labels=1), False
    if classifier.num_labels != 1:
        raise BindError(
            f"The reward model in {folder!r} has {classifier.num_labels} labels, and one is trained. Bind a reward "
            f"model with one label, or a causal LM.",
            code="model.label",
            path=folder,
            labels=tuple(classifier.config.id2label.values()),
        )
    return classifier, True


def _has_head(folder: str) -> bool:
    """Whether the weights of a folder have the head of a classifier."""
    with ExitStack() as files:
        return "score.weight" in stored_tensors(folder, files)


class TorchRewardTrainerEngine(TorchRewardModelEngine, TrainedEngine):
    """A live `RewardTrainer` and `TextRewardScorer`; made by `TorchRewardTrainer.build`."""

    def __init__(
        self, folder: str, body: TorchModel, head: nn.Linear, label: int, budget: Budget, tokenizer: Any
    ) -> None:
        super().__init__(folder, body, head, label, budget, Residence(body.device, []))
        self._own_tokenizer = tokenizer
        self._gathered_head: Gathered | None = None

    def train(self, classifier: Any, spec: TorchRewardTrainer) -> None:
        """Shard the head, and build the optimizer; `classifier` has the body and the head."""
        mesh = self._body.mesh
        gathered = self._gathered_head = mesh.gathered(self._head)
        self._classifier = classifier
        named, blocks = classifier.named_parameters(), blocks_of(classifier)
        self.learner = Learner(named, spec, "reward_model", mesh, self._budget, blocks=blocks)
        roots = [self._body.gathered.root, gathered.root]
        self.residence = Residence(mesh.device, roots, self.learner.optimizer, spec.offload)

    def _logits(self, states: Tensor) -> Tensor:
        gathered = self._gathered_head
        return super()._logits(states) if gathered is None else gathered.call(self._head, states)

    def _checked(self, batch: Rows) -> Rows:
        check_tokens(batch, self._body.vocabulary)  # type: ignore[arg-type]
        self._refuse_too_long(cast(Any, batch).attention_mask)
        return batch

    def _forward(self, micro: Any, objective: Objective[Rows]) -> tuple[Tensor, Tensor | None]:
        """The score of each row on the last token on its mask: float32 ``[rows response]``."""
        inputs = self._last_tokens(TokenInputs(*(getattr(micro, name) for name in TokenInputs._fields)))
        scores, mask = self._scores(inputs).sum(1), micro.response_mask.bool()
        return scatter(scores[mask.any(1)], last_of(mask)), None

    def save_pretrained(self, folder: str) -> None:
        """Write weights (float32), configuration and tokenizer as a folder of a sequence classifier with one label.

        A collective: each rank writes some of the files.
        """
        from flowrl.backends.torch.train.saving import save_gathered  # here and below, since it takes seconds to import
        from flowrl.backends.torch.train.shards import gathered_weights

        mesh = self._body.mesh
        save_gathered(mesh, self._classifier, folder, gathered_weights(mesh, self._classifier, BUCKET_BYTES))
        if self._body.mesh.position.leads:
            self._own_tokenizer.save_pretrained(folder)
