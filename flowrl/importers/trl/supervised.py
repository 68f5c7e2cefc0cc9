"""SFT and DPO of TRL."""

from __future__ import annotations

from typing import Any

from flowrl.importers.plan import GraphPlan, Imported, call
from flowrl.importers.settings import Settings, is_file
from flowrl.importers.trl.data import Prompts
from flowrl.importers.trl.functions import Copies
from flowrl.importers.trl.models import dtype_of, move_reference, trainer, training
from flowrl.importers.trl.script import Script


def supervised(
    part: str, settings: Settings, title: str, model: str, data: str, processes: int, script: Script | None
) -> Imported:
    """SFT or DPO as a training of flowrl."""
    get = settings.get
    bind: dict[str, Any] = {"actor": trainer(settings, model, processes)}
    ranks = {"ranks": processes} if processes > 1 else {}
    if part == "sft":
        graph = GraphPlan("sft", has_reward=False)
        source = "DemoData"
        if get("loss_type") not in ("nll", "chunked_nll", None):
            settings.refuse("loss_type", "flowrl's `sft` is the negative log-likelihood; write a `Loss` for another")
        if not get("assistant_only_loss"):
            settings.differ("assistant_only_loss", "of messages, flowrl trains the turns of the assistant alone")
        if "eos_token" in settings:
            settings.differ("eos_token", "turns are trained up to the token that ends them in the chat template")
    else:
        graph = _preferences(settings)
        source = "PreferenceData"
        move_reference(settings, graph, processes)
        lora = get("use_peft")
        bind["ref"] = call("TorchScorer") if lora else call("TorchScorer", model, dtype=dtype_of(settings), **ranks)
    settings.differ("max_length", "rows are not cut: a longer prompt or response is dropped")
    count = int(get("per_device_train_batch_size")) * int(get("gradient_accumulation_steps")) * processes
    found = training(settings, count)
    copies = None if script is None else Copies(script)
    rows = Prompts(settings, None if script is None else script.trainers[-1].kwargs.get("train_dataset"), None, copies)
    found["data"] = _data(settings, source, data, rows)
    if str(get("eval_strategy")).rpartition(".")[2].lower() not in ("no", "none"):
        settings.differ("eval_strategy", "a loss on held-out rows is not a validation of flowrl: none is written")
        get("eval_steps"), get("dataset_test_split")
    return Imported(title, graph, bind, found, settings, [] if copies is None else [*copies.sources.values()])


def _preferences(settings: Settings) -> GraphPlan:
    """DPO with its sigmoid loss or that of IPO."""
    get = settings.get
    kind, beta, smoothing = get("loss_type"), float(get("beta")), float(get("label_smoothing"))
    if kind in (["ipo"], "ipo"):
        if smoothing:
            settings.differ("label_smoothing", "without effect, because loss_type is ipo")
        return GraphPlan("ipo", {"tau": beta, "per_token": True}, has_reward=False)
    if kind not in (["sigmoid"], "sigmoid", None):
        settings.refuse("loss_type", "flowrl has `dpo` for sigmoid and `ipo`; write a `Loss` for another")
    return GraphPlan("dpo", {"beta": beta, "label_smoothing": smoothing}, has_reward=False)


def _data(settings: Settings, source: str, data: str, rows: Prompts) -> Any:
    get = settings.get
    length, name = get("max_length"), get("dataset_config")
    return call(
        source,
        data,
        max_prompt_length=length,
        max_response_length=length,
        overlong="drop",
        **({} if is_file(data) else {"split": rows.split(get("dataset_train_split"))}),
        **({"name": name} if name else {}),
        **rows.map,
    )
