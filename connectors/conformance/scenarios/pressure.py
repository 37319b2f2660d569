"""Pools that are too small for what runs: preemption, and waiting for each other."""

from __future__ import annotations

from interlace.connectors.conformance.findings import NotJudged
from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.stage import Scenario, Stage


def _preempted(stage: Stage) -> None:
    """Requests grow until one of them has to give up its blocks, while it answers or before;
    later all of them come again."""
    size = stage.block_size
    num_preemptions = 0
    with stage.engine(num_blocks=10, max_num_batched_tokens=3 * size + 2) as engine:
        prompts = [stage.prompt(2, 1 + place) for place in range(3)]
        for turn in ("first", "again"):
            for place, prompt in enumerate(prompts):
                engine.add(f"{turn}{place}", prompt, max_tokens=3 * size)
            engine.run()
            stage.forget_local(engine)
        _reload(stage, engine)
        num_preemptions += _count_preemptions(engine)
    with stage.engine(num_blocks=10) as engine:
        _preempt_different_answers(stage, engine)
        num_preemptions += _count_preemptions(engine)
    for budget in range(size + 1, size + 4):
        with stage.engine(num_blocks=12, max_num_batched_tokens=budget) as engine:
            _preempt_in_prefill(stage, engine)
            num_preemptions += _count_preemptions(engine)
    stage.need_right_kv()
    if not num_preemptions:
        raise NotJudged("nothing was preempted")


def _preempt_in_prefill(stage: Stage, engine: Harness) -> None:
    """A long prompt is computed in chunks that end within blocks, while two requests take away
    what it needs."""
    size = stage.block_size
    for place in range(2):
        engine.add(f"grows{place}", stage.prompt(1, 1 + place), max_tokens=3 * size + 2)
    engine.steps(3)
    engine.add("long", stage.prompt(6, 2), max_tokens=2)
    engine.run()
    stage.forget_local(engine)
    _reload(stage, engine)


def _preempt_different_answers(stage: Stage, engine: Harness) -> None:
    """One prompt is answered in different ways, since each answer is drawn with a seed of its own:
    what is resumed must find its own answer's KV."""
    prompt = stage.prompt(2, 1)
    for seed in range(1, 4):
        engine.add(f"drawn{seed}", prompt, max_tokens=3 * stage.block_size + 2, seed=seed)
    engine.run()
    stage.forget_local(engine)
    _reload(stage, engine)


def _count_preemptions(engine: Harness) -> int:
    return sum(request.num_preemptions for request in engine.requests.values())


def _reload(stage: Stage, engine: Harness) -> None:
    """Let all that was computed so far be loaded, one by one, as far as it is stored."""
    sequences = {tuple(request.all_token_ids) for request in engine.requests.values()}
    for number, sequence in enumerate(sorted(sequences)):
        engine.add(f"reload{number}", [*sequence, 1], max_tokens=1)
        engine.run()
        stage.forget_local(engine)


def _saves_fenced(stage: Stage) -> None:
    """Blocks are handed on as soon as they may, while saves wait; then all is loaded again."""
    size = stage.block_size
    with stage.engine(
        num_blocks=9, max_num_batched_tokens=4 * size, prefix_caching=False
    ) as engine:
        for number in range(5):
            engine.add(f"short{number}", stage.prompt(2, 1), max_tokens=1)
        engine.run()
        for number in range(3):
            engine.add(f"long{number}", stage.prompt(2, number), max_tokens=3 * size)
        engine.run()
        engine.lanes.drain()
        _reload(stage, engine)
    stage.need_right_kv()
    stage.need_loads()


def _tiny_pools(stage: Stage) -> None:
    """Requests with long stored prefixes, which fit alone and not together."""
    for num_blocks in (5, 6, 7, 9):
        with stage.engine(num_blocks=num_blocks, max_num_seqs=4) as engine:
            prompts = [stage.prompt(3, 1 + place) for place in range(3)]
            for prompt in prompts:
                stage.store(engine, prompt)
            for place, prompt in enumerate(prompts):
                engine.add(f"pool{num_blocks}no{place}", prompt, max_tokens=stage.block_size)
                engine.steps(place % 2)
            engine.run()


SCENARIOS = (
    Scenario(
        "tokens-preempted",
        _preempted,
        frozenset(("loaded-kv-right", "saves-visible-when-whole", "failures-exact")),
        in_many_orders=True,
    ),
    Scenario("saves-fenced", _saves_fenced, frozenset(("loaded-kv-right",)), in_many_orders=True),
    Scenario("no-deadlock-in-tiny-pools", _tiny_pools, in_many_orders=True),
)
