"""AdamW on tiles, the global norm and the clip factor against torch's own.

Scope: arithmetic on single tensors and tiles. Not here: when updates happen (`test_same_numbers.py`).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatrain.config import OptimizerConfig
from megatrain.gradients import GradientSink
from megatrain.model import Binding, Slice, Unit, Units
from megatrain.optim import GradientNorm, TiledAdamW, Update, clip_scale
from tiering.schedule import Action, Operand, Verb

KINDS = ("weight", "exp_avg", "exp_avg_sq", "grad")


def layout(sizes: list[int]) -> Units:
    """One unit "u" with flat parameters of these sizes, laid out as models are."""
    model = nn.Module()
    slices, top = [], 0
    for number, size in enumerate(sizes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.empty(size, device="meta")))
        slices.append(Slice(name=f"p{number}", shape=(size,), offset=top))
        top += -(-size // 16) * 16
    unit = Unit(name="u", module=model, slices=tuple(slices), bindings=())
    return Units(model=model, units=(unit,))  # type: ignore[arg-type]


def filled(units: Units, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    (unit,) = units.units
    blocks = {kind: torch.zeros(unit.nbytes // 4) for kind in KINDS}
    for place in unit.slices:
        for kind in KINDS:
            values = torch.randn(place.numel, generator=generator)
            blocks[kind][place.offset : place.offset + place.numel] = values.abs() if kind == "exp_avg_sq" else values
    return blocks


def run_tiles(
    units: Units, blocks: dict[str, torch.Tensor], tile: int, config: OptimizerConfig, update: Update
) -> None:
    adamw = TiledAdamW(units, config)
    nbytes = units.units[0].nbytes
    for lo in range(0, nbytes, tile):
        hi = min(lo + tile, nbytes)
        operands = tuple(Operand(block=f"u/{kind}", lo=lo, hi=hi, address=0, reads=True, writes=True) for kind in KINDS)
        views = {f"u/{kind}": blocks[kind][lo // 4 : hi // 4].view(torch.uint8) for kind in KINDS}
        adamw(Action(verb=Verb.RUN, name=f"upd.u#{lo}", lane="update", operands=operands), views, {"u": update})


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 15, 16, 17, 1000, 1023, 1024, 1025, 4097, 9999]), min_size=1, max_size=5),
    pages=st.sampled_from([1, 2, 3, 100]),
    step=st.sampled_from([1, 2, 1000]),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_tiles_of_any_size_give_the_bits_of_the_whole_tensor(
    sizes: list[int], pages: int, step: int, decay: float, seed: int
) -> None:
    """OM-01, I8: `torch.optim.AdamW(fused=True)` on whole parameters is the reference."""
    units = layout(sizes)
    blocks = filled(units, seed)
    config = OptimizerConfig(lr=0.01, betas=(0.9, 0.95), weight_decay=decay)
    expected = {}
    for place in units.units[0].slices:
        part = {kind: blocks[kind][place.offset : place.offset + place.numel].clone() for kind in KINDS}
        parameter = nn.Parameter(part["weight"])
        parameter.grad = part["grad"]
        reference = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=decay, fused=True)
        reference.state[parameter] = {
            "step": torch.tensor(float(step - 1)), "exp_avg": part["exp_avg"], "exp_avg_sq": part["exp_avg_sq"],
        }  # fmt: skip
        reference.step()
        expected[place] = {"weight": parameter.detach(), **{k: part[k] for k in ("exp_avg", "exp_avg_sq")}}
    gaps = {kind: block.clone() for kind, block in blocks.items()}
    run_tiles(units, blocks, pages * 4096, config, Update(step=step, scale=None))
    for place, values in expected.items():
        for kind, value in values.items():
            found = blocks[kind][place.offset : place.offset + place.numel]
            assert torch.equal(found.view(torch.int32), value.view(torch.int32)), f"{place.name} {kind}"
            gaps[kind][place.offset : place.offset + place.numel] = found
    assert all(torch.equal(gaps[kind], blocks[kind]) for kind in ("weight", "exp_avg", "exp_avg_sq")), "a gap changed"


def test_the_first_step_moves_by_the_learning_rate() -> None:
    """OM-03: weights 0, gradients 1, -2, 1e-3, lr 0.1, no decay: -0.1, 0.1, -0.099999."""
    units = layout([3])
    blocks = {kind: torch.zeros(units.units[0].nbytes // 4) for kind in KINDS}
    blocks["grad"][:3] = torch.tensor([1.0, -2.0, 1e-3])
    run_tiles(units, blocks, 4096, OptimizerConfig(lr=0.1, weight_decay=0.0), Update(step=1, scale=None))
    assert blocks["weight"][:3].tolist() == pytest.approx([-0.1, 0.1, -0.099999], abs=1e-6)


def test_decay_is_decoupled() -> None:
    """OM-04: AdamW, not Adam with L2; a zero gradient still decays the weight."""
    units = layout([4])
    blocks = {kind: torch.zeros(units.units[0].nbytes // 4) for kind in KINDS}
    blocks["weight"][:4] = 1.0
    run_tiles(units, blocks, 4096, OptimizerConfig(lr=0.1, weight_decay=0.1), Update(step=1, scale=None))
    assert blocks["weight"][:4].tolist() == pytest.approx([0.99] * 4)


def test_a_gradient_with_other_strides_has_the_bits_of_a_contiguous_one() -> None:
    """OM-17: a weight [6, 1, 4], as of a convolution over time; on its way to the block the strides are forgotten."""
    place = Slice(name="p", shape=(6, 1, 4), offset=0)
    module = nn.Module()
    module.register_parameter("p", nn.Parameter(torch.empty(place.shape, device="meta")))
    binding = Binding(owner=module, attr="p", unit="u", slice=place)
    unit = Unit(name="u", module=module, slices=(place,), bindings=(binding,))
    units = Units(model=module, units=(unit,))  # type: ignore[arg-type]
    blocks = filled(units, 5)
    odd = torch.randn(24, generator=torch.Generator().manual_seed(6)).as_strided(place.shape, (1, 17, 6))
    whole = nn.Parameter(blocks["weight"][:24].view(place.shape).clone())
    theirs = torch.optim.AdamW([whole], lr=0.01, weight_decay=0.01, fused=True)
    whole.grad = odd.contiguous()
    theirs.step()
    blocks["exp_avg"].zero_()
    blocks["exp_avg_sq"].zero_()

    views = {f"u/{kind}": blocks[kind].view(torch.uint8) for kind in KINDS}
    sink = GradientSink(unit, views, set(), lambda: None)
    leaf = sink.leaves[place]
    (leaf * odd).sum().backward()
    sink.close()
    assert not odd.is_contiguous() and torch.equal(blocks["grad"][:24].view(place.shape), odd)
    run_tiles(units, blocks, 4 * 16, OptimizerConfig(lr=0.01, weight_decay=0.01), Update(step=1, scale=None))
    assert torch.equal(blocks["weight"][:24].view(place.shape), whole.detach())


def test_norm_and_clipping_equal_clip_grad_norm() -> None:
    """OM-06: the reported norm is that before clipping; four tens have norm 20 and become 0.5."""
    units = layout([4, 1000, 17])
    norm = GradientNorm(units)
    gradients = {place: torch.randn(place.shape) * 10 for place in units.units[0].slices}
    parameters = [nn.Parameter(torch.zeros(place.shape)) for place in gradients]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    norm.add(gradients)
    total = norm.total()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert total.item() == expected.item()
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        assert torch.equal(gradient * clip_scale(total, 1.0), parameter.grad)  # type: ignore[arg-type]

    tens = layout([4])
    norm = GradientNorm(tens)
    norm.add({tens.units[0].slices[0]: torch.full((4,), 10.0)})
    total = norm.total()
    assert total.item() == 20.0
    assert (torch.full((4,), 10.0) * clip_scale(total, 1.0)).tolist() == pytest.approx([0.5] * 4, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_tensor_that_is_not_finite_is_named(bad: float) -> None:
    """OM-07: in the model's order, whatever order the gradients become whole in; and in that order, for who updates in
    it.
    """
    units = layout([4, 5, 6])
    first, second, third = units.units[0].slices
    norm = GradientNorm(units)
    broken = torch.ones(6)
    broken[3] = bad
    norm.add({third: broken})
    assert norm.bad_until("u") == "p2"
    broken = torch.ones(5)
    broken[0] = bad
    norm.add({second: broken})
    norm.add({first: torch.ones(4)})
    assert (norm.first_bad(), norm.first_added_bad()) == ("p1", "p2")
    assert not torch.isfinite(norm.total())
    norm.begin()
    assert (norm.first_bad(), norm.first_added_bad()) == (None, None), "the next step starts afresh"


def test_norms_that_are_finite_so_far_say_nothing_of_those_to_come() -> None:
    """OM-07: an update looks at its own gradient and at those before it, as far as they have reached the host."""
    units = layout([4, 5])
    first, second = units.units[0].slices
    norm = GradientNorm(units)
    norm.add({second: torch.ones(5)})
    assert norm.bad_until("u") is None
    norm.add({first: torch.full((4,), np.nan)})
    assert (norm.bad_until("u"), norm.first_bad()) == ("p0", "p0")


def test_the_step_counts_on_past_what_bf16_can_hold() -> None:
    """OM-13, CK-12: the step is an integer of the run, not a tensor that stands still."""
    units = layout([2])
    results = []
    for step in (256, 257, 2**24 + 1):
        blocks = {kind: torch.ones(units.units[0].nbytes // 4) for kind in KINDS}
        config = OptimizerConfig(lr=1.0, betas=(0.999, 0.9999999), weight_decay=0.0)
        run_tiles(units, blocks, 4096, config, Update(step=step, scale=None))
        results.append(blocks["weight"][0].item())
    assert len(set(results)) == 3, results


def whole(units: Units, blocks: dict[str, torch.Tensor], config: OptimizerConfig, update: Update) -> None:
    """The unit in one piece, as a device updates it."""
    nbytes = units.units[0].nbytes
    operands = tuple(
        Operand(block=f"u/{kind}@step.1", lo=0, hi=nbytes, address=0, reads=True, writes=True, tier="DEVICE")
        for kind in KINDS
    )
    views = {f"u/{kind}": blocks[kind].view(torch.uint8) for kind in KINDS}
    action = Action(verb=Verb.RUN, name="upd.u", lane="update", operands=operands)
    TiledAdamW(units, config)(action, views, {"u": update})


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_device_updates_a_whole_unit_to_the_bits_of_its_tiles_or_not_at_all(scale: float | None) -> None:
    """I8, OM-07: a flag that is set leaves every byte of the state; nobody on the host is asked."""
    units, config = layout([1000, 17, 4097]), OptimizerConfig(lr=0.01)
    factor = None if scale is None else torch.tensor(scale)

    def never(unit: str) -> None:
        raise AssertionError(f"{unit} is refused by its flag, where it is")

    tiles, there, left = (filled(units, 7) for _ in range(3))
    before = {kind: block.clone() for kind, block in left.items()}
    run_tiles(units, tiles, 4096, config, Update(step=3, scale=factor))
    for flag, blocks in ((0.0, there), (1.0, left)):
        found = torch.tensor(flag)
        update = Update(step=3, scale=factor, refuse=never, flag=lambda unit, found=found: found)  # type: ignore[misc]
        whole(units, blocks, config, update)
    for kind in KINDS[:3]:
        assert torch.equal(there[kind], tiles[kind]), kind
        assert torch.equal(left[kind], before[kind]), kind


def test_a_flag_is_set_from_the_first_norm_that_is_not_finite_on_until_the_next_step() -> None:
    """OM-07: as `bad_until` says it, but where the gradients are."""
    model = layout([4, 4, 4]).model
    places = [Slice(name=f"p{number}", shape=(4,), offset=0) for number in range(3)]
    parts = [Unit(name=place.name, module=model, slices=(place,), bindings=()) for place in places]
    norm = GradientNorm(Units(model=model, units=tuple(parts)), flags=True)
    for bad, wanted in ((1, [0.0, 1.0, 1.0]), (None, [0.0, 0.0, 0.0])):
        norm.begin()
        for number, place in enumerate(places):
            norm.add({place: torch.full((4,), float("inf") if number == bad else 1.0)})
        found = [norm.flag(place.name).item() for place in places]
        names = [norm.bad_until(place.name) for place in places]
        assert found == wanted, f"{found}, wanted {wanted}"
        assert [name is not None for name in names] == [bool(flag) for flag in wanted], names
