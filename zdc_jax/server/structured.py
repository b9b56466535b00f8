"""Fields that bind an answer to a grammar: OpenAI's `response_format`, and vLLM's structured outputs."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from zdc_jax.generation.grammar import Grammar
from zdc_jax.loading import TextModel
from zdc_jax.server.body import Body, Items, JsonObject, ModelRequest
from zdc_jax.server.errors import RequestError, report_errors_of

Schema = JsonObject | str
ANY_OBJECT = {"type": "object"}


class JsonSchema(Body):
    """Value of `response_format.json_schema`.

    Attributes:
      name: name of the schema, without effect.
      description: description of the schema, without effect.
      json_schema: the schema, the field `schema`; without it, any JSON object fits.
      strict: without effect, since answers always fit.
    """

    name: str = ""
    description: str = ""
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """Format of an answer.

    Attributes:
      type: kind of format; `json_object` means any JSON object.
      json_schema: schema of `json_schema` formats.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """Grammar of an answer, as one of the fields.

    Attributes:
      json_schema: JSON schema, the field `json`.
      regex: regular expression of the whole answer.
      choice: texts, one of which is the answer.
      grammar: grammar in the syntax of Lark or GBNF.
      json_object: whether the answer is any JSON object.
    """

    json_schema: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredRequest(ModelRequest):
    """Body with at most one field that binds the answer to a grammar.

    Attributes:
      response_format: format of the answer.
      structured_outputs: grammar of the answer.
      guided_json: JSON schema.
      guided_regex: regular expression of the whole answer.
      guided_choice: texts, one of which is the answer.
      guided_grammar: grammar in the syntax of Lark or GBNF.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None

    def choose_grammar(self, model: TextModel) -> tuple[str, Grammar | None]:
        """Return the name of the field that binds the answer, and its grammar; '' and None if it is free.

        Subclasses may imply another grammar for a model.

        Raises:
          RequestError: several fields bind the answer, or the value is none.
        """
        sources = self._list_sources()
        if not sources:
            return "", None
        field, new, value = sources[0]
        if len(sources) > 1:
            other = sources[1][0]
            message = f"{field} and {other}: only one grammar is allowed; leave one out"
            raise RequestError(message, param=other)
        with report_errors_of(prefix=f"{field}: "):
            return field, new(value)

    def _list_sources(self) -> list[tuple[str, Callable[[Any], Grammar], Any]]:
        """Return the name of each field that binds the answer, its kind of grammar, and its source."""
        outputs = self.structured_outputs
        sources: list[tuple[str, Callable[[Any], Grammar], Any]] = [
            ("guided_json", Grammar.json, self.guided_json),
            ("guided_regex", Grammar.regex, self.guided_regex),
            ("guided_choice", Grammar.choice, self.guided_choice),
            ("guided_grammar", Grammar.text, self.guided_grammar),
            ("structured_outputs.json", Grammar.json, outputs.json_schema),
            ("structured_outputs.regex", Grammar.regex, outputs.regex),
            ("structured_outputs.choice", Grammar.choice, outputs.choice),
            ("structured_outputs.grammar", Grammar.text, outputs.grammar),
            ("structured_outputs.json_object", Grammar.json, ANY_OBJECT if outputs.json_object else None),
        ]
        if (answer := self.response_format) is not None and answer.type != "text":
            schema: Schema | None = None
            if answer.type == "json_schema":
                if answer.json_schema is None:
                    message = "response_format.json_schema is missing; type='json_schema' needs it"
                    raise RequestError(message, param="response_format")
                schema = answer.json_schema.json_schema
            sources.append(("response_format", Grammar.json, ANY_OBJECT if schema is None else schema))
        return [source for source in sources if source[2] is not None]
