"""Reads what a request passes to the chat template: its tools, and options such as `enable_thinking`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.server.tool_fields import ToolFields

_NO_OPTIONS = {"messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "conversation"}
"""Names that a template or `apply_chat_template` uses, but that a request may not set as options."""

_OF_THOUGHTS = ("enable_thinking", "reasoning_effort")


class TemplateFields(ToolFields):
    """Holds the tools and the template options of a request."""

    effort_param: ClassVar[str] = "reasoning_effort"
    """The name of the field for the effort in a request."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        """Return the tools that are shown to the model, in the form that templates know."""
        return [tool.definition for tool in self.offered_tools]

    def told_options(self, template: str) -> dict[str, Any]:
        """Return the options of the template.

        Raises ApiError 400 if the template does not know an option that would matter.
        """
        wanted = self._wanted_options(template)
        options = {name: value for name, value in wanted.items() if not _is_lacking(name, template)}
        for name, value in options.items():
            if name in _NO_OPTIONS or (value not in (False, None) and name not in template):
                param = f"chat_template_kwargs.{clip(name)}"
                message = f"Unsupported parameter: '{param}': this model's chat template has no such option."
                raise ApiError(400, message, param=param, code="unsupported_parameter")
        return options

    def left_out_of(self, template: str) -> list[str]:
        """Return the options that clients send to every model and that this template lacks, with the reason."""
        lacking = [name for name in self._wanted_options(template) if _is_lacking(name, template)]
        names = {"reasoning_effort": self.effort_param}
        return [f"{names.get(name, name)}: this model's chat template has no such option" for name in lacking]

    def _wanted_options(self, template: str) -> dict[str, Any]:
        """Return all options that the request asks for. An effort of "none" switches thoughts off."""
        options = dict(self.chat_template_kwargs)
        if self.enable_thinking is not None:
            options["enable_thinking"] = self.enable_thinking
        is_off = self.effort == "none" and "enable_thinking" in template
        if is_off:
            options.setdefault("enable_thinking", False)
        if self.effort is not None and not (is_off and "reasoning_effort" not in template):
            options["reasoning_effort"] = self.effort
        return options

    def with_template(self, texts: Any, template: str) -> Any:
        """Return a tokenizer that renders its chat template with the tools and options of this request.

        Raises ApiError 400 if the template does not know an option.
        """
        options, tools = self.told_options(template), self.told_tools
        return texts.with_options(options | {"tools": tools} if tools else options)


def _is_lacking(name: str, template: str) -> bool:
    """Return whether a template lacks an option about thoughts, which models without thoughts do not need."""
    return name in _OF_THOUGHTS and name not in template
