"""Reads what a request passes to the chat template: its tools, and options such as `enable_thinking`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.server.tool_fields import ToolFields

_NO_OPTIONS = {"messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "conversation"}
"""Names that a template or `apply_chat_template` uses, but that a request may not set as options."""


class TemplateFields(ToolFields):
    """Holds the tools and the template options of a request."""

    effort_param: ClassVar[str] = "reasoning_effort"
    """The name of the field for the effort in a request."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        """Return the tools that are shown to the model, in the form that templates know."""
        return [tool.definition for tool in self.offered_tools]

    def told_options(self, template: str) -> dict[str, Any]:
        """Return the options of the template. Raises ApiError 400 if it does not know one."""
        options = dict(self.chat_template_kwargs)
        if self.effort is not None:
            options["reasoning_effort"] = self.effort
        for name, value in options.items():
            if name in _NO_OPTIONS or (value not in (False, None) and name not in template):
                param = self.effort_param if name == "reasoning_effort" else f"chat_template_kwargs.{clip(name)}"
                message = f"Unsupported parameter: '{param}': this model's chat template has no such option."
                raise ApiError(400, message, param=param, code="unsupported_parameter")
        return options

    def with_template(self, texts: Any, template: str) -> Any:
        """Return a tokenizer that renders its chat template with the tools and options of this request.

        Raises ApiError 400 if the template does not know an option.
        """
        options, tools = self.told_options(template), self.told_tools
        return texts.with_options(options | {"tools": tools} if tools else options)
