"""The arguments of the routes of `endpoint.py`, typed: what a request may hold, and how it is read.

pydantic parses the JSON itself: nesting, numbers and text are bounded while they are read.
"""

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kit.rollout.protocol import Way
from kit.rollout.server.versions import Failure

if TYPE_CHECKING:
    from starlette.requests import Request

INT32, INT64 = (1 << 31) - 1, (1 << 63) - 1
Name = Annotated[str, Field(min_length=1, max_length=255)]
Count = Annotated[int, Field(ge=0, le=INT32)]
Ids = Annotated[str, Field(max_length=32 << 20)]  # base64 of int32


class _Arguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class OfVersion(_Arguments):
    """A request to a version; session and version None: to the base."""

    session: Name | None = None
    version: Count | None = None

    @property
    def asked(self) -> tuple[str | None, int | None]:
        """(session, version); `Failure` if only one of them is given."""
        if (self.session is None) != (self.version is None):
            raise Failure(400, f"session ({self.session!r:.40}) and version ({self.version}) belong together.")
        return self.session, self.version


class Generate(OfVersion):
    token_ids: Ids
    n: int
    max_tokens: int
    temperature: Annotated[float, Field(ge=0, le=1e6)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Annotated[int, Field(ge=-1, le=INT32)]
    stop_token_ids: Annotated[list[Count], Field(max_length=1024)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=64)] | None = None
    request_id: Annotated[str, Field(max_length=255)] = "none"
    routing: bool = False


class Score(OfVersion):
    sequences: Annotated[list[Ids], Field(min_length=1, max_length=4096)]


class Named(_Arguments):
    """A request that must name a version."""

    session: Name
    version: Count


class Noise(Named):
    sigma: Annotated[float, Field(ge=0, lt=1)]
    seed: Annotated[int, Field(ge=-INT64, le=INT64)]


class Directory(_Arguments):
    path: Annotated[str, Field(min_length=1, max_length=4096)]


class Stage(BaseModel):
    """Query of a stage request, whose values are all text."""

    model_config = ConfigDict(extra="forbid")

    way: Way
    run: Name
    session: Name
    version: Count
    base_hash: Name


Model = TypeVar("Model", bound=BaseModel)


async def read(request: "Request", kind: type[Model]) -> Model:
    """Read a request's body; `Failure` 400 names the argument, what is wrong with it and its value."""
    return checked(kind.model_validate_json, await request.body())


def checked(validate: Any, given: Any) -> Any:
    """Return what a pydantic validator makes of its argument; `Failure` 400 if it refuses it."""
    try:
        return validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise Failure(400, f"the body is not a JSON object: {first['msg']}.") from None
        where = ".".join(map(str, first["loc"]))
        raise Failure(400, f"{where}: {first['msg']}; it is {first['input']!r:.60}.") from None
