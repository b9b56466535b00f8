"""Base classes of request bodies."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """JSON body of a request. Null means that a field is absent, and numbers in quotes are refused."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class ModelRequest(Body):
    """Body that may name a model.

    Attributes:
      model: name of the served model, or None.
    """

    model: str | None = None
