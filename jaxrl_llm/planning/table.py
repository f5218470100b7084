"""A plan for a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from jaxrl_llm.planning.plan import Plan
from jaxrl_llm.planning.search import Found

__all__ = ["plan_text", "search_text"]


def _size(number: float) -> str:
    """Bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def plan_text(plan: Plan, width: int = 120) -> str:
    """Tables of memory, work and collectives, and what follows from them."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    chips = len(plan.topology.devices)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "1"
    apart = f", {plan.samplers} chips that only sample" if plan.samplers else ""
    slices = f" x {plan.topology.slices} slices" if plan.topology.slices > 1 else ""
    console.print(
        f"{plan.model}, {plan.shape.num_parameters / 1e9:.2f} billion parameters, on {plan.topology.name}{slices} "
        f"({chips} chips): {mesh}{apart}"
    )
    w = plan.work
    console.print(
        f"a train step: {w.samples} sequences of {w.context} tokens ({w.prompt} given) in {w.rows} rows of "
        f"{w.row_tokens}, {w.micro_rows} at a time; {w.updates} update{'s' * (w.updates > 1)}; {w.slots} slots, {w.pages} pages"
    )
    _memory(console, plan)
    _work(console, plan)
    if any(x.bytes >= 2**20 for c in plan.compiled for x in c.cost.collectives):
        _collectives(console, plan)
    if any(c.cost.largest for c in plan.compiled):
        _largest(console, plan)
    for note in plan.notes:
        console.print(f"Note: {note}")
    spare, phase = plan.spare_bytes, plan.largest
    hbm = _size(plan.chip.hbm_bytes)
    if plan.fits:
        console.print(
            f"Fits: {phase.program} needs most, {_size(phase.bytes)} of {hbm}; {_size(spare)} are left."
        )
    else:
        most = max(phase.memory, key=lambda role: phase.memory[role])
        console.print(
            f"Does not fit: {phase.program} needs {_size(phase.bytes)} of {hbm}, {_size(-spare)} too much; the largest "
            f"part is {most}, {_size(phase.memory[most])}."
        )
    console.print(
        f"A train step takes at least {_time(plan.step_seconds)}: at most {plan.tokens_per_second_per_chip:,.0f} trained "
        "tokens per second and chip."
    )
    return out.getvalue().rstrip("\n")


def _table(console: Console, title: str) -> Table:
    console.print(f"\n{title}")
    return Table()


def _memory(console: Console, plan: Plan) -> None:
    roles = list(dict.fromkeys(role for phase in plan.phases for role in phase.memory))
    roles = [role for role in roles if any(p.memory.get(role, 0) >= 2**20 for p in plan.phases)]
    table = _table(console, "HBM of a chip while a program runs")
    table.add_column("role")
    for phase in plan.phases:
        table.add_column(phase.program, justify="right")
    for role in roles:
        table.add_row(role, *(_size(p.memory[role]) if role in p.memory else "" for p in plan.phases))
    table.add_section()
    table.add_row("together", *(_size(p.bytes) for p in plan.phases))
    left = (plan.chip.hbm_bytes - p.bytes for p in plan.phases)
    table.add_row("left", *(_size(x) if x >= 0 else f"-{_size(-x)}" for x in left))
    console.print(table)


def _work(console: Console, plan: Plan) -> None:
    table = _table(console, "One run of a program, of a chip")
    for name in (
        "program",
        "runs a step",
        "TFLOP",
        "HBM traffic",
        "ICI",
        "DCN",
        "at least",
        "limited by",
        "MFU",
    ):
        table.add_column(name, justify="left" if name in ("program", "limited by") else "right")
    for c in plan.compiled:
        table.add_row(
            c.program.name,
            f"{c.program.runs:,.4g}",
            f"{c.cost.flops / 1e12:.3g}",
            _size(c.hbm_bytes),
            _size(c.cost.network_bytes("ICI")),
            _size(c.cost.network_bytes("DCN")),
            _time(c.time),
            c.limited_by,
            f"{100 * plan.utilisation(c):.1f} %" if c.program.useful_flops else "",
        )
    console.print(table)


def _collectives(console: Console, plan: Plan) -> None:
    table = _table(console, "Collectives of one run, of a chip")
    for name in ("program", "kind", "along", "network", "number", "sent"):
        table.add_column(name, justify="right" if name in ("number", "sent") else "left")
    for c in plan.compiled:
        for x in c.cost.collectives:
            if x.bytes >= 2**20:
                row = (c.program.name, x.kind, " x ".join(x.axes) or "?", x.network)
                table.add_row(*row, f"{x.count:,.0f}", _size(x.bytes))
    console.print(table)


def _largest(console: Console, plan: Plan) -> None:
    table = _table(console, "Largest arrays that a program makes, of a chip")
    for name in ("program", "array", "size", "made by"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    for c in plan.compiled:
        for array, where in c.cost.largest[:3]:
            shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            table.add_row(c.program.name, shape, _size(array.bytes), "/".join(where.split("/")[-3:]))
    console.print(table)


def search_text(found: Found, width: int = 120) -> str:
    """What was tried, what is proposed, and the plan of that."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    table = _table(console, f"{found.considered} ways, {len(found.ranked)} should fit; compiled")
    for name in ("settings", "estimate", "update at least", "limited by", "HBM", "fits"):
        table.add_column(name, justify="left" if name in ("settings", "limited by") else "right")
    for candidate, plan in found.tried:
        update = plan.compiled[0]
        table.add_row(
            " ".join(candidate.overrides),
            _time(candidate.seconds),
            _time(plan.step_seconds),
            update.limited_by,
            _size(plan.largest.bytes),
            "yes" if plan.fits else "no",
        )
    console.print(table)
    if found.plan is None:
        console.print("Nothing fits. Take more chips, fewer tokens (model.max_context), or a smaller model.")
        return out.getvalue().rstrip("\n")
    settings = " ".join(f"--set {override}" for override in found.overrides)
    console.print(f"Proposed: {settings}", soft_wrap=True)
    return f"{out.getvalue()}\n{plan_text(found.plan, width)}"
