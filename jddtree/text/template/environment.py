"""The sandbox in which chat templates run: the dialect of the transformers library, within limits, origins
kept.

Contract: a template gives the text that it gives in Jinja's own `ImmutableSandboxedEnvironment` with the
settings, filters and functions of transformers (loop controls, `{% generation %}`, `tojson` with options,
`raise_exception`, `strftime_now`). The text is an `OriginText` in which the characters that the template's
source wrote are marked. Past a limit (bounds.py) a `TemplateLimit` is raised. Not offered:
`autoescape`, `lipsum`, methods of bytes, and methods of texts from `safe` or `escape` that could grow them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

from jddtree.text.template.bounds import Budget, check_operands
from jddtree.text.template.field_format import FieldFormatter
from jddtree.text.template.filters import bounded_filter, replacements
from jddtree.text.template.origin import join_texts, tracked, written
from jddtree.text.template.percent_format import percent_pieces

_GROWING = frozenset("join replace center ljust rjust zfill expandtabs translate format format_map".split())


class _OriginCodeGenerator(CodeGenerator):
    """Marks the texts of the template's source, computes nothing while compiling, and counts turns of
    loops.
    """

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("str_join = environment.join_values")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        text = isinstance(node.value, str)
        self.write("environment.written(" if text else "(")
        super().visit_Const(node, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.written({super()._output_const_repr(group)})"

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        turn = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(turn).set_lineno(node.lineno))
        super().visit_For(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._admitted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._admitted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._admitted(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        self.fail("autoescape is not offered to chat templates", node.lineno)

    visit_ScopedEvalContextModifier = visit_EvalContextModifier

    def _admitted(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.admit(")
        visit(node, frame)
        self.write(")")


class _Generation(Extension):
    """`{% generation %}`: marks what a model wrote, for training; here the block is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace that does not print what it holds, which may be itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of one template; several threads may render at once, each inside its own `limited`."""

    code_generator_class = _OriginCodeGenerator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    written = staticmethod(written)

    def __init__(self) -> None:
        """Set up the dialect."""
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        self._thread = threading.local()
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _now, "namespace": _Namespace}
        self.filters |= replacements()
        self.filters |= {name: bounded_filter(self, name, call) for name, call in self.filters.items()}

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Render within a fresh budget; every rendering must happen inside."""
        self._thread.budget = Budget()
        try:
            yield
        finally:
            del self._thread.budget

    def check_time(self) -> None:
        """Raise TemplateLimit when this thread's rendering takes too long."""
        self._thread.budget.check_time()

    def admit(self, value: Any) -> Any:
        """The value; raises TemplateLimit when it is too large."""
        return self._thread.budget.admit(value)

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Output of the template, a block or a macro, within the limits."""
        return self.admit(join_texts("", self._timed(pieces)))

    def join_values(self, values: Iterable[Any]) -> str:
        """What the operator `~` gives."""
        return self.admit(join_texts("", map(str, values)))

    def _timed(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            self.check_time()
            yield piece

    def call(self, context: Context, function: Any, /, *values: Any, **named: Any) -> Any:  # type: ignore[override]
        """Call a function, macro or method for the template."""
        self.check_time()
        return self.admit(super().call(context, function, *values, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator for the template."""
        check_operands(operator, left, right)
        if operator == "%":
            left = tracked(left)
        if operator == "%" and isinstance(left, Markup):
            # Raises TemplateLimit where Markup would not.
            join_texts("", percent_pieces(str.__str__(left), right))
        result = super().call_binop(context, operator, left, right)
        return self._thread.budget.admit_sum(left, right, result) if operator == "+" else self.admit(result)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute or item; methods of a text are those of OriginText."""
        return super().getattr(tracked(obj), attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item or attribute, as in `getattr`."""
        return super().getitem(tracked(obj), argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether the template may use an attribute."""
        if isinstance(obj, bytes) or attr == "to_bytes" or (isinstance(obj, Markup) and attr in _GROWING):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `format_map` that keep origins and limits; None for every other value."""
        if super().wrap_str_format(value) is None or isinstance(value.__self__, Markup):
            return None
        pieces = FieldFormatter(self).pieces
        if value.__name__ == "format_map":
            return lambda named: join_texts("", pieces(value.__self__, (), named))
        return lambda *values, **named: join_texts("", pieces(value.__self__, values, named))


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
