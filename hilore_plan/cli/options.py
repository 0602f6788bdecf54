"""The options of `hilore profile`: defaults, a YAML file, and flags, which win over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hilore_plan.errors import FileError, UsageError
from hilore_plan.schema.record import Head


class ProfileOptions(BaseModel):
    """What to measure: the workload of an actor update, and where to run it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: int = Field(default=2, ge=1)
    prompt_tokens: int = Field(default=256, ge=0)
    response_tokens: int = Field(default=512, ge=1)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "cpu"
    attn: Literal["sdpa", "eager"] = "sdpa"
    lora_rank: int = Field(default=0, ge=0)
    head: Head = "fused"
    accumulation: bool = True
    token_points: int = Field(default=4, ge=1)
    codecs: str = "none"
    calibration_microbatches: int = Field(default=16, ge=4)
    rollouts: str | None = None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `profile_model`."""
        values = self.model_dump()
        values["attention"] = values.pop("attn")
        names = (name.strip() for name in self.codecs.split(","))
        values["codecs"] = tuple(name for name in names if name not in ("", "none"))
        return values


def read_options(config: Path | None, flags: dict[str, Any]) -> ProfileOptions:
    """Flags that were given over the file's values over the defaults.

    Raises:
        FileError: if the file cannot be read, or names an option that does not exist or a value that makes no sense.
    """
    values = _read_yaml(config) if config is not None else {}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return ProfileOptions.model_validate({**values, **given}, strict=True)
    except ValidationError as error:
        raise _bad_option(error, config) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}", hint="check its name and folder") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        where = getattr(error, "problem_mark", None)
        place = f" (line {where.line + 1})" if where is not None else ""
        raise FileError(f"{path} is not valid YAML{place}", hint="one option a line: batch: 4") from error
    if not isinstance(values, dict):
        raise FileError(f"{path} does not hold options", hint="one option a line: batch: 4")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _bad_option(error: ValidationError, config: Path | None) -> FileError | UsageError:
    first = error.errors()[0]
    name = str(first["loc"][0]).replace("_", "-")
    known = ", ".join(field.replace("_", "-") for field in ProfileOptions.model_fields)
    where = f"{config}: " if config is not None else ""
    if first["type"] == "extra_forbidden":
        return FileError(f"{where}there is no option {name!r}", hint=f"the options are {known}")
    return FileError(
        f"{where}option {name}: {first['msg'][:1].lower()}{first['msg'][1:]}", hint="hilore profile --help"
    )
