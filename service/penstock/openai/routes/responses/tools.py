"""Makes one list of functions of the tools of /v1/responses, some of which stand in namespaces.

The contract has no namespaces. The model is told of a function of one by a name that has both, and its calls
are told apart again in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.openai.failures import invalid_value, unsupported_value
from penstock.openai.schemas.chat import MAX_TOOLS
from penstock.openai.schemas.responses import BuiltInTool, FunctionTool, NamespaceTool, Other, Tool


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    tool: FunctionTool
    path: str
    """Where it stands in the body, such as "tools[2].tools[0]"."""
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """The name that the model knows it by."""
        return flat_name(self.namespace, self.tool.name)


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a function for the model. Some clients end a namespace with the two lines themselves."""
    return name if not namespace else f"{namespace.removesuffix('__')}__{name}"


def functions_of(tools: Sequence[Tool] | None) -> list[Function]:
    """The functions, in their order. Raises ApiError, with the field, for a tool that is neither a function
    nor passed over, and for more functions than the server takes.
    """
    functions: list[Function] = []
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, FunctionTool):
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


def ignored_tools(tools: Sequence[Tool] | None) -> set[str]:
    """What of the tools has no effect: those that are passed over, and the descriptions of namespaces."""
    ignored = {f"tools[].{tool.type}" for tool in tools or () if isinstance(tool, BuiltInTool)}
    if any(isinstance(tool, NamespaceTool) and tool.description for tool in tools or ()):
        ignored.add("tools[].description")
    return ignored


def names_of(tools: Sequence[Tool] | None) -> Mapping[str, Mapping[str, str]]:
    """From the name that the model knows a function by to the fields that name it in a call, for functions
    of namespaces.
    """
    return {
        function.flat_name: {"name": function.tool.name, "namespace": function.namespace}
        for function in functions_of(tools)
        if function.namespace
    }


def _not_taken(tool: Other, path: str) -> Exception:
    return unsupported_value(f"{path}.type", f"functions are the only tools, and this is {tool.type[:40]!r}.")
