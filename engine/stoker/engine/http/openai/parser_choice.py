"""The choice of parsers for one request's answers: from the configuration, the chat template and the request.

Pure; called by the front.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal

from stoker.engine.errors import RequestRefused
from stoker.engine.http.errors import bad_request, from_refusal
from stoker.engine.http.openai.allowed_calls import allowed_calls
from stoker.engine.http.openai.tool_parser import (
    FORMATS,
    LISTED,
    OutputParser,
    ReasoningParser,
    ToolCallParser,
    ToolParserName,
    detected_format,
)
from stoker.engine.http.openai.tools import ToolUse
from stoker.engine.output_grammar import OutputGrammar, ReasoningPlace

SHORT_ID_CHARACTERS = 9
"""Mistral's templates take only call ids of this length."""


@dataclass(frozen=True)
class ParserChoice:
    """The parsers that the configuration names."""

    tool_calls: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = "auto"
    reasoning: Literal["auto", "none", "think"] = "auto"

    def for_request(
        self,
        use: ToolUse,
        template: str | None,
        *,
        reasons_already: bool,
        shows_reasoning: bool = True,
    ) -> AnswerParsers:
        """The parsers of a request.

        Args:
            use: the request's tools.
            template: the model's chat template.
            reasons_already: the prompt ends with the begin of reasoning.
            shows_reasoning: the reasoning is a field of the answer.

        Raises:
            ApiError: 400, the form of the model's calls is not known.
        """
        name = detected_format(template) if self.tool_calls == "auto" else self.tool_calls
        form: ToolParserName | None = None if name == "none" else name
        if use.mode == "auto" and form is None:
            raise bad_request(
                "tools: the form in which this model writes tool calls is not known. Use tool_choice required or a "
                "function, tool_choice none, or start the engine with --tool-call-parser.",
                "tools",
                "tool_parser_unknown",
            )
        calls = _calls_grammar(use, form, template)
        return AnswerParsers(use, form, self._reasons(template), reasons_already, shows_reasoning, calls)

    def _reasons(self, template: str | None) -> bool:
        """Whether answers may begin with reasoning."""
        return self.reasoning == "think" or (self.reasoning == "auto" and ReasoningParser.BEGIN in (template or ""))


def _calls_grammar(use: ToolUse, form: ToolParserName | None, template: str | None) -> OutputGrammar | None:
    """What keeps an answer from calls that are not allowed, where it need not call. Raises ApiError 400."""
    if use.mode != "auto" or use.allowed is None or form is None:
        return None
    try:
        return allowed_calls(use, form, template)
    except RequestRefused as refused:
        raise from_refusal(refused) from refused


@dataclass(frozen=True)
class AnswerParsers:
    """Makes a parser for each choice of one answer."""

    use: ToolUse
    form: ToolParserName | None
    reasoning: bool
    reasons_already: bool
    shows_reasoning: bool = True
    """False: the reasoning is taken out of the answer and not returned."""
    grammar: OutputGrammar | None = None
    """What the answer must be unless the request has a grammar: where only some tools may be called."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the markers of calls are special tokens, which the text must keep."""
        return self.use.mode == "auto" and self.form is not None and FORMATS[self.form].special

    @property
    def place(self) -> ReasoningPlace:
        """Whether reasoning comes before what follows a grammar."""
        if not self.reasoning:
            return "none"
        return "begun" if self.reasons_already else "before"

    def parser(self) -> OutputParser:
        """A parser for one choice's text."""
        reasoning = ReasoningParser(begun=self.reasons_already) if self.reasoning else None
        return OutputParser(reasoning, self._calls())

    def call_id(self) -> str:
        """A new call's id."""
        if self.form == "mistral":
            return secrets.token_hex(SHORT_ID_CHARACTERS)[:SHORT_ID_CHARACTERS]
        return f"call_{secrets.token_hex(12)}"

    def finish(self, parser: OutputParser, finish: str) -> str:
        """The finish reason of a choice. As with OpenAI, an answer that had to call one function just stops."""
        return "tool_calls" if finish == "stop" and parser.has_calls and self.use.mode != "named" else finish

    def _calls(self) -> ToolCallParser | None:
        use = self.use
        if use.mode == "named":
            return ToolCallParser(LISTED, name=use.name, most=use.most_calls)
        if use.mode == "required":
            return ToolCallParser(LISTED, forced=True, most=use.most_calls)
        if use.mode == "auto" and self.form is not None:
            return ToolCallParser(FORMATS[self.form], most=use.most_calls, names=use.allowed, functions=use.functions)
        return None
