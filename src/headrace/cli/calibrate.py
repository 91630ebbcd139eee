"""calibrate: a threshold with a guarantee for early exit, or for tokens of a smaller model."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headrace.cli.help import short_help
from headrace.cli.opening import fetch, open_llm
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import print_table, say

# The confidence of an exit or of a smaller model.
Criterion = Literal["max_prob", "margin", "saturation", "classifier"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "exits cascade source criterion loss delta epsilon max_tokens",
        ("headrace calibrate MODEL --exits exits -i prompts.txt", "Lowest threshold with a loss of at most a tenth."),
        ("headrace calibrate MODEL --cascade SMALLER -i prompts.txt", "The same for a cascade with a smaller model."),
        ("headrace run MODEL --exits exits --exit-threshold 0.9 --show-exits 'Why?'", "Use a threshold."),
    )
    app.command(cls=short)(with_groups(calibrate))


def calibrate(
    model: ModelName,
    options: ModelOptions,
    source: Annotated[
        Path,
        typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts not used for training, one per line."),
    ],
    criterion: Annotated[Criterion, typer.Option(help="Confidence: max_prob, margin, saturation or classifier.")] = "max_prob",
    decay: Annotated[float, typer.Option(min=0.0, max=100.0, help="As --exit-decay: decay of the threshold.")] = 0.0,
    slope: Annotated[float, typer.Option(min=0.0, max=100.0, help="As --exit-slope: for earlier exits.")] = 0.0,
    loss: Annotated[
        Literal["text", "token", "risk"],
        typer.Option(
            help="text: 1 - ROUGE-L with the full model's answer; token: share of early tokens that differ; risk: ROUGE-L with "
            'a reference ("reference" of each JSON line) below the full model\'s.'
        ),
    ] = "text",
    delta: Annotated[float, typer.Option(help="Largest mean loss.")] = 0.1,
    epsilon: Annotated[float, typer.Option(help="Probability that the bound does not hold.")] = 0.05,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Most tokens of an answer.")] = 64,
) -> None:
    """Find the lowest threshold of early exit, or of a cascade by token, whose loss is bounded (Learn then Test).

    Thresholds are tested on generated answers, from the safest one down, until the bound can no longer be shown. The last one
    that passed is stored in the folder of --exits, or for a cascade in HEADRACE_HOME. The bound holds for prompts like these.
    """
    _check(options, criterion, decay, slope, delta, epsilon)

    from headrace.startup.thresholds import save_for
    from headrace.stats.calibration import minimum_n
    from headrace.training.early_exit_calibration import CalibrationConfig, calibrate_threshold
    from headrace.training.heads import prompt_tokens
    from headrace.workflows.prompts import read_prompts, read_references

    every = read_prompts(source)
    fresh = _untrained(every, options.exits)
    prompts = [every[at] for at in fresh]
    references = read_references(source) if loss == "risk" else []
    right = [references[at] for at in fresh] if references else []
    if len(prompts) < (least := minimum_n(delta, epsilon)):
        raise ValueError(
            f"{source} has {len(prompts)} prompts, and fewer than {least} can show nothing at this delta; add some"
        )
    llm = open_llm(model, options)
    config = CalibrationConfig(criterion, decay, slope, max_tokens, loss, delta, epsilon, options.cascade is not None)
    rule, result = calibrate_threshold(
        llm,
        [prompt_tokens(llm, prompt) for prompt in prompts],
        config,
        lambda threshold, mean: say(f"{criterion} {threshold:g}: {mean:.4f} lost"),
        references=[llm.tokenizer.encode(text, add_special=False) for text in right] if right else None,
    )
    _print_tests(result.tried)
    if rule is None:
        say(f"no threshold can be shown to lose at most {delta:g} on {result.n} prompts: none is set, the full model writes")
        return
    rule = save_for(rule, llm.opened, llm.settings, fetch(options.cascade) if config.cascade else None)
    say(rule.summary())
    if not config.cascade and rule.layers >= (depth := llm.model_config.num_layers):
        say(f"no token exited early: all took {depth} of {depth} layers, so this rule saves nothing; try a larger --delta")


def _print_tests(tried: Any) -> None:
    rows = [(f"{test.threshold:g}", f"{test.risk:.4f}", f"{test.p_value:.2g}") for test in tried]
    print_table(("threshold", "lost", "p-value"), rows)


def _untrained(prompts: list[Any], exits: str | Path | None) -> list[int]:
    """Indices of the prompts that did not train the exits. Raises ValueError if there is none."""
    if exits is None:
        return [*range(len(prompts))]

    from headrace.startup.heads import trained_on
    from headrace.training.overlap import without

    if (known := trained_on(exits)) is None:
        say(f"{exits} does not record which prompts trained its exits; the guarantee holds only for prompts that did not")
        return [*range(len(prompts))]
    fresh = without(prompts, known)
    if not fresh:
        raise ValueError(f"all {len(prompts)} prompts trained the exits in {exits}, so they prove nothing; give others")
    if len(fresh) < len(prompts):
        say(f"{len(prompts) - len(fresh)} of {len(prompts)} prompts trained the exits in {exits} and are left out")
    return fresh


def _check(options: ModelOptions, criterion: Criterion, decay: float, slope: float, delta: float, epsilon: float) -> None:
    """Raise typer.BadParameter without exits or a smaller model, for a criterion that a smaller model lacks, and for numbers
    out of range."""
    if options.exits is None and options.cascade is None:
        raise typer.BadParameter(
            "calibrate needs exits of the model: --exits FOLDER (headrace train-heads --kind exit), "
            "or a smaller model: --cascade MODEL"
        )
    if options.cascade is not None and (criterion in ("saturation", "classifier") or decay or slope):
        raise typer.BadParameter(
            "--criterion saturation, --criterion classifier, --decay and --slope need exits; leave them out with --cascade"
        )
    if not 0 < delta < 1 or not 0 < epsilon < 1:
        raise typer.BadParameter("--delta and --epsilon lie between 0 and 1")
    options.check()
