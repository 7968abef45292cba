"""``ConversionReport`` lists the modules that were replaced, rebuilt in backward, or left unchanged, with reasons."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import nn

from .._sizes import change_text, text_of
from ..memory import Footprint
from .verify import Verification, verify


class Row(NamedTuple):
    """All calls of one module, or of one function that a module calls.

    Attributes:
        paths: all names under which the module is registered, followed by the names of its activation; for a function,
            the path of its caller.
        what: the class of the module, or the name of the function.
        to: the class that the module became; "" if it is unchanged.
        why: the reason why it is unchanged; "" if it was replaced.
        nbytes: an estimate of the bytes that all calls together no longer keep; None if sizes are not known.
    """

    paths: tuple[str, ...]
    what: str
    to: str
    why: str
    nbytes: int | None


TITLES = {
    "replaced": "Replaced by fused modules ({}), with the bytes that are kept no longer",
    "recomputed": "Unchanged, but their outputs are rebuilt in backward instead of kept ({})",
    "skipped": "Unchanged, and kept as before ({})",
}
# A row of the printed report shows at most this many names; ``Row.paths`` has all.
NAMES = 3
PEAK_STAYS = (
    "  The peak of a model of few layers is the backward of its largest layer, which needs its own tensors however\n"
    "  little is kept for the others."
)


@dataclass(eq=False)
class ConversionReport:
    """The result of ``fusedseg.convert``.

    ``print(report)`` shows it as a table, and ``to_json()`` returns it for programs.

    Attributes:
        model: the converted model.
        mode: "exact" or "leaky".
        how: how the order of the calls was found, or why it was not found.
        replaced: rows of the modules that are fused modules now: norms with their activations, pools and convolutions.
        recomputed: rows of the modules and functions that run as before, but whose output is not kept, because the
            scope around the model's forward rebuilds it in backward.
        skipped: rows of the modules whose tensors are kept as before.
        before: bytes of a training step on the example before the conversion, counted on tensors without values.  None
            without an example, for a scripted model, for a lazy model that has not run yet, and if the stock model's
            own step fails on tensors without values (``uncounted``).
        after: the same bytes after the conversion; None if and only if ``before`` is None.
        uncounted: the error of the stock model's own step on tensors without values, such as of a model that reads
            values; "" if there was none.
        guarantee: the parts of the observed flow that must not change, so that the model stays right; "" if no norm was
            fused.
    """

    model: nn.Module = field(repr=False)
    mode: str
    how: str
    replaced: list[Row]
    recomputed: list[Row]
    skipped: list[Row]
    # Any stands for None, so that type checkers need no test for it after a call with an example.
    before: Footprint | Any = None
    after: Footprint | Any = None
    uncounted: str = ""
    guarantee: str = ""

    def verify(self, example_input: object, *, training: bool | None = None) -> "Verification":
        """Runs copies of the model and of its stock form on the example, forward and backward, and compares them.

        Both copies start from the same random state.

        Args:
            example_input: a tensor, a sequence of arguments, or a mapping of keywords, as in ``convert``.
            training: the mode to run in; None keeps the mode that the model is in.

        Returns:
            A ``Verification`` with the largest relative differences of outputs, gradients and buffers.
        """
        return verify(self.model, example_input, training)

    def _sections(self) -> dict[str, list[Row]]:
        return {"replaced": self.replaced, "recomputed": self.recomputed, "skipped": self.skipped}

    def to_json(self) -> str:
        """The report as a JSON object, without the model."""
        rows = {name: [row._asdict() for row in rows] for name, rows in self._sections().items()}
        memory = {
            name: None if m is None else asdict(m) for name, m in (("before", self.before), ("after", self.after))
        }
        head = {"model": type(self.model).__name__, "mode": self.mode, "how": self.how, "guarantee": self.guarantee}
        uncounted = {"uncounted": self.uncounted} if self.uncounted else {}
        return json.dumps({**head, **rows, **memory, **uncounted})

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__}, mode {self.mode!r}: {self.how}"]
        for name, rows in self._sections().items():
            if rows:
                lines += ["", TITLES[name].format(len(rows)), *_table(rows)]
        if self.guarantee:
            lines += ["", "If the flow changes later, by a flag for example"]
            lines += [f"  {line}" for line in self.guarantee.splitlines()]
        if self.before and self.after:
            lines += ["", "A training step on the example"]
            lines.append(change_text("kept for backward", self.before.saved, self.after.saved))
            lines.append(change_text("at the peak", self.before.peak, self.after.peak))
            if self.after.saved < 0.9 * self.before.saved and self.after.peak > 0.97 * self.before.peak:
                lines.append(PEAK_STAYS)
        if self.uncounted:
            lines += ["", f"A training step on the example is not counted: without values, {self.uncounted}"]
        return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [(_names(r.paths), r.what, r.to or r.why, "" if r.nbytes is None else text_of(r.nbytes)) for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _names(paths: Sequence[str]) -> str:
    """The names of a row.  A network that registers its modules several times has rows of many names."""
    shown = [path or "(the model)" for path in paths]
    return ", ".join(shown) if len(shown) <= NAMES else f"{shown[0]} and {len(shown) - 1} other names"


def guarantee_of(inplace: int, exact: int) -> str:
    """The guarantee for a number of norms in place and of other fused norms, and the way that needs none."""
    lines = []
    if inplace:
        lines.append(
            f"In place ({inplace}): only the norm may read the convolution's output, and only the activation the "
            "norm's; inplace=False makes the norm exact"
        )
    if exact:
        lines.append(f"Exact ({exact}): only the activation may read the norm's output; any other change is safe")
    if lines:
        lines.append('torch.compile(stock model, backend="fusedseg") relies on no flow: it notices each change')
    return "\n".join(lines)
