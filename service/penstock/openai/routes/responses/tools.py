"""Makes one list of functions of the tools of /v1/responses, some of which stand in namespaces, and some of
which are custom tools.

The contract has no namespaces. The model is told of a function of one by a name that has both, and its calls
are told apart again in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.client import Tool as ClientTool
from penstock.openai.failures import invalid_value, missing, unsupported_value
from penstock.openai.routes.custom_tools import custom_tool, pattern_of
from penstock.openai.routes.turns import check_name, named_choice
from penstock.openai.schemas.chat import MAX_TOOLS
from penstock.openai.schemas.responses import (
    BuiltInTool,
    CustomFormat,
    CustomTool,
    FunctionTool,
    NamedTool,
    NamespaceTool,
    Other,
    Tool,
    ToolChoice,
)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call, or a custom tool, for which a function stands."""

    tool: FunctionTool | CustomTool
    path: str
    """Where it stands in the body, such as "tools[2].tools[0]"."""
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """The name that the model knows it by."""
        return flat_name(self.namespace, self.tool.name)

    def offered(self) -> ClientTool:
        """Describe the tool as the model is told of it. Raises ApiError for a grammar that cannot be
        enforced.
        """
        if isinstance(self.tool, CustomTool):
            pattern = _pattern(self.tool.format, f"{self.path}.format")
            return custom_tool(self.flat_name, self.tool.description, pattern)
        return ClientTool(
            name=self.flat_name,
            description=self.tool.description or "",
            parameters=self.tool.parameters,
            strict=bool(self.tool.strict),
        )


def _pattern(form: CustomFormat | None, where: str) -> str | None:
    """Return the regular expression that the text of a custom tool must match; None for any text."""
    given = {} if form is None else {"syntax": form.syntax, "definition": form.definition}
    for name, value in given.items():
        if form is not None and (value is None) == (form.type == "grammar"):
            if value is None:
                raise missing(f"{where}.{name}")
            raise invalid_value(f"{where}.{name}", 'it goes with the type "grammar".')
    if form is None or form.syntax is None or form.definition is None:
        return None
    return pattern_of(form.syntax, form.definition, f"{where}.syntax")


def flat_name(namespace: str | None, name: str) -> str:
    """Make the name of a function for the model. Some clients end a namespace with the two lines
    themselves.
    """
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def functions_of(tools: Sequence[Tool] | None) -> list[Function]:
    """List the functions, in their order. Raises ApiError, with the field, for a tool that is neither a
    function nor passed over, and for more functions than the server takes.
    """
    functions: list[Function] = []
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, FunctionTool | CustomTool):
            functions.append(Function(tool, f"tools[{i}]"))
        elif isinstance(tool, NamespaceTool):
            for j, inner in enumerate(tool.tools):
                path = f"tools[{i}].tools[{j}]"
                if isinstance(inner, Other):
                    raise _not_taken(inner, path)
                functions.append(Function(inner, path, tool.name))
        elif isinstance(tool, Other):
            raise _not_taken(tool, f"tools[{i}]")
    if len(functions) > MAX_TOOLS:
        raise invalid_value("tools", f"all namespaces together have more than {MAX_TOOLS} functions.")
    return functions


def offered_of(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> tuple[list[Function], str | None]:
    """Return the functions that a choice of tools leaves, and the client's `tool_choice`. Raises ApiError,
    with the field, for a name that no function has, and for a tool that cannot be chosen.
    """
    functions = functions_of(tools)
    if choice is None or isinstance(choice, str):
        return functions, choice
    names = [function.flat_name for function in functions]
    if isinstance(choice, NamedTool):
        return functions, named_choice(choice.name, names, "tool_choice.name")
    if isinstance(choice, Other):
        raise unsupported_value(
            "tool_choice.type", f"the type {choice.type[:40]!r} is not taken; choose a function."
        )
    left = set()
    for i, allowed in enumerate(choice.tools):
        if isinstance(allowed, Other):
            raise _not_taken(allowed, f"tool_choice.tools[{i}]")
        if isinstance(allowed, NamedTool):
            check_name(allowed.name, names, f"tool_choice.tools[{i}].name")
            left.add(allowed.name)
    if not left and choice.mode == "required":
        raise invalid_value("tool_choice.tools", "none of them is a tool that the model can call.")
    return [function for function in functions if function.flat_name in left], choice.mode if left else None


def custom_names(tools: Sequence[Tool] | None) -> frozenset[str]:
    """Return the names that the model knows custom tools by."""
    return frozenset(
        function.flat_name for function in functions_of(tools) if isinstance(function.tool, CustomTool)
    )


def ignored_tools(tools: Sequence[Tool] | None) -> set[str]:
    """Return what of the tools has no effect: those that are passed over, and the descriptions of
    namespaces.
    """
    ignored = {f"tools[].{tool.type}" for tool in tools or () if isinstance(tool, BuiltInTool)}
    if any(isinstance(tool, NamespaceTool) and tool.description for tool in tools or ()):
        ignored.add("tools[].description")
    return ignored


def names_of(tools: Sequence[Tool] | None) -> Mapping[str, Mapping[str, str]]:
    """Map the name that the model knows a function by to the fields that name it in a call, for functions of
    namespaces.
    """
    return {
        function.flat_name: {"name": function.tool.name, "namespace": function.namespace}
        for function in functions_of(tools)
        if function.namespace
    }


def _not_taken(tool: Other, path: str) -> Exception:
    return unsupported_value(
        f"{path}.type", f"functions and custom tools are the only ones, and this is {tool.type[:40]!r}."
    )
