"""The constants of the drafting policy, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """The policy's constants. `plain step`: a step without drafts."""

    # -- which drafts pay ----------------------------------------------------------------------------------------------
    # A smaller gain in tokens per second may be noise.
    min_gain: float = 1.05
    # A token with a smaller probability of acceptance is worth its row on no machine.
    min_alpha: float = 0.25
    # Tokens that are reached less often than this are not considered.
    min_reach: float = 0.05
    # Tokens of the longest draft: those further behind are rarely reached.
    max_depth: int = 16
    # A step with more rows than this factor times the largest one measured has an unknown cost: a tree is tried once, alone.
    unknown_rows: float = 1.5
    # -- acceptance ----------------------------------------------------------------------------------------------------
    # Before anything is observed: of a model, and of matches by their confidence 1, 2, 3 and more.
    model_prior: float = 0.75
    match_priors: tuple[float, ...] = (0.3, 0.5, 0.6)
    # Drafted tokens that a prior counts for, and those that the average of one request and of all requests remembers.
    prior_weight: float = 4
    request_memory: float = 10
    shared_memory: float = 25
    # Requests without a draft of one kind, after which one request tries it again: nothing else would show that it pays now.
    retry_requests: int = 16
    # -- times ---------------------------------------------------------------------------------------------------------
    # Of this many measurements the least counts: a step that shared the core with another process took longer.
    samples: int = 8
    # Plain steps measured before drafts are compared with them.
    plain_samples: int = 2
    # Steps after which a plain step is measured again (sooner at first), and after which other measurements are dropped.
    remeasure_steps: int = 64
    forget_steps: int = 512
    # Steps for which a measurement is recent enough to read a whole text for.
    recent_steps: int = 8
    # Guesses before the first measurement, in plain steps: one more row, a draft step, a token that a draft model reads.
    row_guess: float = 0.2
    draft_guess: float = 0.3
    read_guess: float = 0.06
    # Slower than this factor times the usual step: another process had the core. The rest is not charged to drafting.
    contention: float = 1.25
    # Steps from which the upper rows of the next step are predicted, next to requests that exit early.
    upper_samples: int = 16
    # -- reading by a draft model --------------------------------------------------------------------------------------
    # Unread tokens that a draft model reads as it begins to draft, and those beyond which it reads a whole text first.
    free_lag: int = 3
    max_lag: int = 16
    # Steps over which the reading of a few tokens is spread.
    lag_steps: int = 4
    # A whole text is read if the rest of the output saves this many times its reading time.
    payback: float = 3.0
    # Tokens of an output before one has ended, the weight of one that ends, and the fewest it may still have.
    output_tokens: float = 256.0
    output_weight: float = 0.1
    min_remaining: int = 32
    # -- what drafting may lose ----------------------------------------------------------------------------------------
    # Share of all time that drafting may lose for good; plain steps that a budget begins with; the most it keeps.
    loss_share: float = 0.01
    start_steps: float = 4.0
    max_draft_steps: float = 8.0
    max_read_steps: float = 128.0
    # -- asking drafters -----------------------------------------------------------------------------------------------
    # Share of all time that asking drafters may take while nothing comes of it.
    ask_share: float = 0.01
    # From this batch size on a sequence without a promising draft is left out for this many steps.
    crowd: int = 4
    rest_steps: int = 3
    # Steps for which a sequence is left out whose tree does not pay: building the tree takes time too.
    tree_rest_steps: int = 16
    # Exceptions of a drafter after which a request does without it.
    max_failures: int = 3


TUNING = Tuning()
