"""Every number that tunes `auto`, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """The constants of `auto` and of the cost model that it decides by.

    The values were found by measurement. `docs/auto.md` lists them in the same order.
    """

    # --- back-off -----------------------------------------------------------------------------------
    backoff_after: int = 16
    """After this many steps without a useful draft, `auto` looks for drafts only now and then."""
    backoff_interval: int = 8
    """During back-off it looks once in this many engine steps."""
    long_idle_factor: int = 4
    """After `backoff_after` times this many idle steps, it looks half as often."""
    backoff_batch_size: int = 8
    """With n times this many running sequences, back-off starts n² times sooner and looks n² times
    less often, because one look delays the whole batch."""

    # --- chains of a draft head that finds them on the device ---------------------------------------
    chain_review_interval: int = 8
    """While such a head drafts, its benefit is weighed again once in this many steps."""
    min_chain_tokens: float = 0.2
    """A head whose chains bring fewer accepted tokens than this per step pauses, whatever steps seem
    to cost: a sequence that always drafts does not learn what plain steps take."""
    max_trial_chains: int = 6
    """A sequence pauses after at most this many chains that brought nothing."""
    trial_chains_per_token: float = 8.0
    """The trial is one chain, and this many more for each token that chains bring its tenant."""
    chain_pause_steps: int = 32
    """The first pause takes this many steps."""
    chain_pause_growth: int = 4
    """Each further pause is this many times longer."""
    max_chain_pause_exponent: int = 3
    """A pause grows at most this many times."""

    # --- lookups and the joined tree ----------------------------------------------------------------
    lookup_growth: int = 2
    """Drafters look up this many times as many nodes as the last draft had."""
    lookup_margin: int = 4
    """And this many nodes more."""
    initial_draft_nodes: int = 8
    """What counts as the size of the last draft before there was one."""
    min_node_rate: float = 0.01
    """Nodes with a lower estimated rate of being reached are dropped."""
    rate_buckets: float = 12.0
    """Acceptance rates of joined nodes are tracked by the square root of their estimate, rounded to
    one of this many levels."""
    min_sibling_overlap: float = 0.05
    """A node is discounted if siblings from other drafters have at least this total rate."""
    shared_estimate_weight: float = 12.0
    """How many trials a prior counts as, in the acceptance rates that a tenant's sequences share."""
    sequence_estimate_weight: float = 4.0
    """How many trials the shared rate counts as, in the acceptance rates of one sequence."""
    sampled_head_prior: float = 0.8
    """Share of a draft head's estimate that is believed at first where tokens are sampled."""

    # --- calibration --------------------------------------------------------------------------------
    head_prior_first: float = 0.6
    """Prior rate of the best node of a tree that a draft head contributed to."""
    head_prior_decay: float = 0.78
    """Each further node's prior rate is this share of the one before."""
    head_prior_nodes: int = 16
    """How many nodes have such a prior."""
    lookup_gain_levels: tuple[float, ...] = (0.15, 0.5, 1.0, 2.0)
    """Steps are grouped by the tokens that lookups are expected to bring; here a new group begins."""
    level_nodes: int = 8
    """The expected tokens of a tree are summed over this many of its best nodes."""
    calibration_memory: float = 0.98
    """What is left of earlier drafts in a calibration after a new draft."""
    calibration_idle_memory: float = 0.985
    """What is left of them after a step without a draft."""
    calibration_weight: float = 10.0
    """How many expected tokens the prior of a calibration counts as."""
    max_calibration: float = 1.0
    """The largest factor by which an estimate is multiplied."""
    calibration_sharing: float = 1.0
    """How much of a sequence's prior is what its tenant's sequences have seen."""
    head_gain_rate: float = 0.15
    """How fast the expected gains of a draft head follow its latest tree."""
    head_gain_recovery: float = 0.01
    """How fast they return to the prior in a step that does not use the head."""
    head_calibration_weight: float = 4.0
    """`calibration_weight` for trees that a draft head contributed to."""
    head_calibration_sharing: float = 0.7
    """`calibration_sharing` for them."""
    chain_memory: float = 0.96
    """`calibration_memory` for chains of a head that finds them on the device."""
    chain_weight: float = 4.0
    """`calibration_weight` for them."""
    chain_sharing: float = 0.5
    """`calibration_sharing` for them."""
    level_rate: float = 0.05
    """How fast it is learned what a head brings in one group of steps against its mean."""
    min_level_factor: float = 0.4
    """The smallest such factor of one step."""
    max_level_factor: float = 2.5
    """The largest such factor of one step."""

    # --- the draft budget ---------------------------------------------------------------------------
    min_speedup: float = 1.02
    """By how much drafting must raise the expected tokens per second. A maximum over estimates picks
    the ones that are too high."""
    head_budget_factor: int = 2
    """A sequence that uses a draft head may add this many times the nodes that the estimate is worth:
    the tree is cut by marginal cost once it is known."""

    # --- the cost model -----------------------------------------------------------------------------
    tile_rows: int = 16
    """Rows of a kernel tile."""
    min_tile_share: float = 0.75
    """A prefill chunk that is cut at the end of a tile keeps at least this share of itself."""
    curve_reach: float = 0.6
    """By which factor passes of half or twice the size count less for a knot of the cost curve."""
    borrowed_weight: float = 1.0
    """What passes of other sizes count for a knot, against the square of the number of its own."""
    curve_memory: float = 0.99
    """What is left of the weight of earlier passes after a pass of another size."""
    stored_weight: int = 3
    """How many passes of each size a stored curve counts as."""
    first_save: int = 16
    """The curve is stored after this many passes, and again each time that their number has doubled."""
    save_interval: int = 4096
    """It is stored again after at most this many passes."""
    context_rate: float = 0.2
    """How fast the usual number of cached tokens follows the last pass."""
    max_correction: float = 2.0
    """For the prefill cost, a single step counts as at most this many times faster or slower than
    expected."""
    extra_sequence_share: float = 0.35
    """What each further sequence adds to the cost of drafting, as a share of the first one's."""
    draft_cost_recovery: int = 8
    """After this many steps without a draft of a kind, its long-term usual cost counts once more."""
    long_window: int = 127
    """Usual costs are medians over this many steps."""
    short_window: int = 15
    """Recent costs are medians over this many steps."""
    min_timed_drafts: int = 3
    """The cost of a kind of drafts is an assumption until this many of them were timed."""
    lookup_cost_prior: float = 0.05
    """Assumed cost of a lookup, in plain passes."""
    head_cost_prior: float = 0.3
    """Assumed cost of a draft head."""
    overlapped_head_cost_prior: float = 0.31
    """Assumed cost of a draft head whose chain is scored while it is still being found."""
    prefill_rise_rate: float = 0.35
    """How fast the prefill cost follows a step that was slower than expected."""
    prefill_fall_rate: float = 0.15
    """How fast it follows one that was faster: others wait for prefill, so caution comes first."""
    prefill_undisturbed_growth: float = 1.001
    """By which factor per step the undisturbed prefill cost may rise towards the current one."""
    plain_step_sampling: int = 4
    """Of plain steps of a single sequence, one in this many updates the cost model."""

    # --- measuring passes, where no prior is known --------------------------------------------------
    profiling_context: int = 128
    """The cost curve is measured after this many cached tokens."""
    profiling_rounds: int = 5
    """How many passes of each size are timed, after one that is not counted."""
    few_rounds_from: int = 16
    """Of passes with this many nodes or more, two fewer are timed, because they take long."""
    profiling_candidates: int = 8
    """How many candidates each node of a timed pass returns."""
    flat_factor: float = 2.0
    """If a prefill chunk of many nodes takes less than this many times one node, passes cost about
    the same whatever their size."""
    long_context: int = 2048
    """Prefill cost is measured after this many cached tokens, too."""
    long_context_chunk: int = 16
    """Nodes of the prefill chunks that are timed there."""


DEFAULT_CONFIG = AutoConfig()
"""What is used unless another one is given."""
