"""P1: where a byte lives never changes a number; the plain torch and transformers loop is the reference.

Scope: whole runs through `verify`, over architectures, placements, both update modes, micro-batches, serial or not.
Not here: single parts (`test_stream.py`, `test_optim.py`), the command around it (`test_cli.py`).
"""

import itertools
from typing import Any

import pytest
from conftest import RunFile, slow
from models import MODELS, TIED
from rich.console import Console

from megatrain.config import load_run
from megatrain.verify import verify

STEPS = 3


pytestmark = pytest.mark.usefixtures("known_machine")


def run_both(run_file: RunFile, changes: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    return verify(load_run(run_file({"optimizer.lr": 0.01, **changes})), steps, Console(quiet=True))


def setting(resident: float, clip: float | None, micro_batch: int, serial: bool) -> dict[str, Any]:
    return {
        "tiers.resident": resident,
        "tiers.host_memory": "8MiB",
        "tiers.serial": serial,
        "train.max_grad_norm": clip,
        "train.micro_batch": micro_batch,
    }


@pytest.mark.parametrize("clip", [None, 0.5], ids=["fused", "clipped"])
@pytest.mark.parametrize("resident", [slow(0), 0.5, slow(1)])
@pytest.mark.parametrize("model", MODELS)
def test_a_tiered_run_equals_the_plain_loop_bit_for_bit(
    run_file: RunFile, model: str, resident: float, clip: float | None
) -> None:
    """P1, I8, OM-01, MA-01, MA-12: one micro-batch and four, serial and overlapped.

    Tied weights with several micro-batches sum in another order (the stated exception); there the loss of the first
    step, which no update has touched, is still equal, and all placements agree with each other.
    """
    for micro_batch, serial in ((4, False), (1, True)) if clip else ((4, True), (1, False)):
        result = run_both(run_file, {"model.config": MODELS[model], **setting(resident, clip, micro_batch, serial)})
        share = {0: 1.0, 0.5: pytest.approx(0.5, abs=0.25), 1: 0.0}[resident]
        assert result["nvme_share"] == share
        if model in TIED and micro_batch < 4:
            assert result["losses"][0] == result["plain_losses"][0]
            assert result["losses"] == pytest.approx(result["plain_losses"], rel=1e-5)
            continue
        shown = {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "differing")}
        assert result["identical"], shown
        assert result["max_abs_diff"] == {"weight": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
        assert result["losses"][0] > result["losses"][-1], shown


@pytest.mark.parametrize("model", ["llama-tied", *(slow(m) for m in TIED if m != "llama-tied")])
def test_tied_weights_have_the_same_bits_in_every_placement(run_file: RunFile, model: str) -> None:
    """P1, MA-12: with several micro-batches tied models leave the plain loop by a rounding, but all in the same way."""
    results = {}
    for resident, clip, serial in itertools.product((0, 0.5, 1), (0.5,), (False, True)):
        result = run_both(run_file, {"model.config": MODELS[model], **setting(resident, clip, 1, serial)})
        results[resident, serial] = result["losses"], result["grad_norms"]
    assert len({str(value) for value in results.values()}) == 1, results


def test_gradients_on_nvme_give_the_same_bits_as_gradients_in_ram(run_file: RunFile) -> None:
    """P1, OM-01: with a budget that has no room for all gradients, clipping spills them."""
    tight = {"train.max_grad_norm": 0.5, "tiers.host_memory": "250KiB", "tiers.resident": 0}
    spilled = run_both(run_file, {"model.config": MODELS["llama"], **tight})
    assert spilled["placement"]["NVME"]["grad"] > 0, spilled["placement"]
    assert spilled["identical"], spilled


@pytest.mark.parametrize("share", [0.25, 0.5, 1])
@pytest.mark.parametrize("resident", [0, slow(0.5)])
def test_when_a_unit_is_updated_never_changes_a_number(run_file: RunFile, share: float, resident: float) -> None:
    """P1, I8: updates of some units wait for the next forward; a flush ends the last step."""
    for serial in (False, True):
        changes = setting(resident, None, 2, serial) | {"tiers.late_updates": share}
        result = run_both(run_file, {"model.config": MODELS["llama"], **changes}, steps=4)
        assert result["identical"], result


def test_twenty_steps_stay_equal(run_file: RunFile) -> None:
    """OM-01: differences would grow; there are none to grow. Several passes also reuse every address."""
    for clip in (None, 0.5):
        result = run_both(run_file, {"model.config": MODELS["llama"], **setting(0, clip, 2, False)}, steps=20)
        assert result["identical"], result


def test_verify_sees_a_single_bit(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: the comparison itself; a reference with another weight decay is not the same run."""
    import megatrain.verify as subject

    plain = subject._plain

    def other(prepared: Any, *args: Any) -> Any:
        changed = prepared.run.optimizer.model_copy(update={"weight_decay": 0.0101})
        return plain(_replaced(prepared, prepared.run.model_copy(update={"optimizer": changed})), *args)

    monkeypatch.setattr(subject, "_plain", other)
    result = run_both(run_file, {"model.config": MODELS["llama"], **setting(0, None, 2, False)})
    assert not result["identical"]
    assert result["differing"], result


def _replaced(prepared: Any, run: Any) -> Any:
    from dataclasses import replace

    return replace(prepared, run=run)
