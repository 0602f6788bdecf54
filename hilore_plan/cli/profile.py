"""`hilore profile`: measure a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def profile(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A hub id, a local folder, builtin:NAME, or package.module:factory.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.", show_default=False)],
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a micro-batch.  [default: 2]")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=0, help="Prompt tokens of a row.  [default: 256]")] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, help="Response tokens of a row.  [default: 512]")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="The model's number format.  [default: bfloat16]"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.  [default: cpu]")] = None,
    attn: Annotated[
        Literal["sdpa", "eager"] | None, typer.Option(help="The attention kernel.  [default: sdpa]")
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(min=0, help="Train LoRA adapters of this rank; 0 trains everything.  [default: 0]")
    ] = None,
    head: Annotated[
        Literal["fused", "full"] | None,
        typer.Option(help="How the loss sees the logits: in chunks, or whole as older trainers do.  [default: fused]"),
    ] = None,
    accumulation: Annotated[
        bool | None,
        typer.Option(
            "--accumulation/--no-accumulation",
            help="Gradients stay allocated between micro-batches.  [default: accumulation]",
        ),
    ] = None,
    token_points: Annotated[
        int | None, typer.Option(min=1, help="Micro-batch lengths to measure at.  [default: 4]")
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Calibrate these, so that plans may compress: int8,fp8_e4m3,int4. Takes minutes.  [default: none]"
        ),
    ] = None,
    calibration_microbatches: Annotated[
        int | None,
        typer.Option(min=4, help="Micro-batches to calibrate on; a quarter is kept aside to judge by.  [default: 16]"),
    ] = None,
    rollouts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSONL of prompts, completions, rewards.  [default: sampled from the model]"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML file with these same options by name; flags win over it.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON instead of tables.")] = False,
) -> None:
    """Measure what each choice costs here.

    The result is a profile: seconds of every op, bytes of every value, and what the two plain modes cost as a
    whole. The workload is one GRPO actor update: two micro-batches of BATCH rows, each PROMPT_TOKENS +
    RESPONSE_TOKENS long.
    """
    from hilore_plan.cli.options import read_options

    flags = {
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "dtype": dtype,
        "device": device,
        "attn": attn,
        "lora_rank": lora_rank,
        "head": head,
        "accumulation": accumulation,
        "token_points": token_points,
        "codecs": codecs,
        "calibration_microbatches": calibration_microbatches,
        "rollouts": rollouts,
    }
    _measure(model, output, read_options(config, flags).arguments(), force=force, json=json)


def _measure(model: str, output: Path, arguments: dict[str, Any], *, force: bool, json: bool) -> None:
    from hilore_plan.cli import rows, ui
    from hilore_plan.cli.devices import check_device
    from hilore_plan.profiler import malloc
    from hilore_plan.schema.io import check_writable, save

    check_writable(output, force=force)
    device = str(arguments["device"])
    check_device(device)
    if device == "cpu":
        malloc.reexec_with_malloc_settings()
    from hilore_plan.integrations.profile_source import profile_model

    with ui.progress() as progress:
        result = profile_model(model, **arguments, progress=progress)
    save(result, output)
    ui.show_document(result, [rows.profile_steps(result)], as_json=json)
    ui.note(f"wrote {output}")
    ui.next_command(f"hilore plan {output} --budget 1.1x-gc -o plans/{output.name}")
