"""Draws what a view shows: a pure function, from `Shown` and a size to a rich renderable.

    Console().print(render(shown, 80, 24))

Everything is said by words and signs; colour only helps. The lines are as many as asked for, and as
wide; what does not fit is left out from the end of the least important part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from interlace.cli.live import units
from interlace.cli.live.lines import (
    ASCII,
    STYLES,
    UNICODE,
    Signs,
    bar,
    beside,
    crop,
    fitted,
    fitting,
    line,
    plain,
    title,
    wrapped,
)
from interlace.cli.live.shown import Shown, pages_of
from interlace.engine.snapshot import RequestSnapshot
from interlace.engine.transfer_picture import ConnectorPicture, TierPicture, TransferPicture
from interlace.layers.hardware.fact import Unknown

WIDE = 120
"""Columns from which on there are two parts beside each other."""
_ROOMY = 60
"""Columns from which on the last line tells how often it is drawn."""
_FULL_GRID = 34
"""Lines from which on layers are numbered, and states explained."""
_LABEL = 9
_KEYS = "q quit  p pause  + faster  - slower  n next page  s save"
_FEW_KEYS = ("q quit", "p pause", "+/- speed", "n page", "s save")
_COLUMNS = (
    ("state", 9),
    ("prompt", 8),
    ("local", 7),
    ("loaded", 7),
    ("new", 7),
    ("answer", 7),
    ("blocks", 7),
)
"""Of requests, with their widths."""
_LEFT_OUT_FIRST = ("blocks", "new", "local", "answer", "loaded", "prompt")
"""Where columns are too many."""
_LEAST_ID = 8
_STATE_ORDER = ("failed", "computed", "saved", "arrived", "copying", "reading", "waiting")


def render(shown: Shown, width: int, height: int, *, unicode: bool = True) -> RenderableType:
    """The whole picture."""
    rows = lines_of(shown, width, height, unicode=unicode)
    for row in rows[:-1]:
        row.end = "\n"
    return Group(*rows)


def lines_of(shown: Shown, width: int, height: int, *, unicode: bool = True) -> list[Text]:
    """The same as `height` lines of `width` columns."""
    width, height = max(width, 20), max(height, 4)
    view = _View(shown, UNICODE if unicode else ASCII)
    head = view.head(width)
    foot = view.foot(width)
    body = view.body(width, height - len(head) - 1)
    rows = [*head, *body][: height - 1]
    rows += [Text("")] * (height - 1 - len(rows))
    return [crop(row, width) for row in (*rows, foot)]


class _View:
    """Draws the parts."""

    def __init__(self, shown: Shown, signs: Signs) -> None:
        self._shown = shown
        self._frame = shown.frame
        self._snapshot = shown.frame.snapshot
        self._signs = signs
        pages = pages_of(shown.frame)
        self._page_number = shown.page % len(pages)
        self._num_pages = len(pages)
        self._page, self._connector = pages[self._page_number]

    # ---------------------------------------------------------------- head and foot

    def head(self, width: int) -> list[Text]:
        """What runs, and how fast."""
        shown, engine = self._shown, self._frame.engine
        state, style = "running", "green"
        if shown.gone is not None:
            state, style = "GONE", "bold red"
        elif self._snapshot.dead is not None:
            state, style = "FAILED", "bold red"
        elif shown.is_paused:
            state, style = "PAUSED", "bold yellow"
        elif not (self._frame.num_running or self._frame.num_waiting):
            state, style = "idle", "dim"
        name = f"interlace {engine.pid} "
        rest = max(0, width - len(name) - len(state) - 1)
        facts = [engine.model, f"{engine.device} {engine.dtype}", engine.kv_connector or ""]
        pieces = [plain(one, self._signs) for one in facts if one]
        said = fitting(pieces, rest, "  ") or pieces[0]  # better a part of its name than nothing
        first = line((name, "bold"), fitted(said, rest), " ", (state, style))
        if shown.gone is not None or self._snapshot.dead is not None:
            why = plain(shown.gone or self._snapshot.dead or "", self._signs)
            return [first, line((fitted(why, width), "red")), *self._rates(width)[:1]]
        return [first, *self._rates(width)]

    def _rates(self, width: int) -> list[Text]:
        rates = self._frame.rates
        pieces = (
            f"{units.rate(rates.generated_per_s)} tokens/s",
            f"{units.rate(rates.computed_per_s)} computed/s",
            _and_one("step", rates.step_s, "longest", rates.longest_step_s),
            _and_one("first token", rates.first_token_s, "newest", rates.newest_first_token_s),
            f"loop lag {units.seconds(rates.loop_lag_s)}",
            f"{units.rate(rates.steps_per_s)} steps/s",
        )
        rows = wrapped(pieces, width)
        return [line(row) for row in rows[:3]]

    def foot(self, width: int) -> Text:
        """What keys do, or what became of one."""
        shown = self._shown
        right = f"{self._page} {self._page_number + 1}/{self._num_pages}"
        if width >= _ROOMY:
            right += f"  every {units.seconds(shown.every_s)}"
        if shown.num_lost:
            right = f"{units.count(shown.num_lost)} frames lost  {right}"
        left = plain(shown.note, self._signs) if shown.note else _KEYS
        room = width - len(right) - 1
        if room < len(_KEYS) and not shown.note:
            left = fitting(_FEW_KEYS, room, "  ")
        return line((fitted(left, max(0, room)), "bold" if shown.note else "dim"), " ", right)

    # ---------------------------------------------------------------- pages

    def body(self, width: int, height: int) -> list[Text]:
        """The page."""
        if self._page == "requests":
            return self._requests(width, height)
        if self._page == "stores":
            return self._stores(width)[:height]
        if width >= WIDE:
            half = (width - 3) // 2
            left = [*self._layers(half, height), Text(""), *self._lanes(half)]
            right = [*self._pool(width - 3 - half), *self._tiers(width - 3 - half)]
            right += self._gpu(width - 3 - half)
            right += self._requests(width - 3 - half, height - len(right))
            return beside(left, right, (half, width - 3 - half), f" {self._bar_sign} ")[:height]
        upper = [*self._layers(width, height), *self._lanes(width)]
        lower = [*self._pool(width), *self._tiers(width), *self._gpu(width)]
        rest = height - len(upper) - len(lower)
        return [*upper, *lower, *self._requests(width, max(2, rest))][:height]

    @property
    def _bar_sign(self) -> str:
        return "|" if self._signs.is_ascii else "│"

    # ---------------------------------------------------------------- layers

    def _layers(self, width: int, height: int) -> list[Text]:
        signs, connector = self._signs, self._connector
        if connector is None:
            said = "no KV connector"
            return [title("layers", width, signs, f"{said}, so nothing is loaded or saved", said)]
        name = "" if len(self._snapshot.connectors) == 1 else plain(connector.name, signs)
        rows = [title("layers", width, signs, name)]
        if connector.error is not None:
            rows += [line((f"  {plain(connector.error, signs)}", "red"))]
            return rows
        transfers = [one for one in (connector.load, connector.save) if one is not None]
        if not transfers:
            return [*rows, line(("  nothing was loaded or saved yet", "dim"))]
        for one in transfers:
            rows += self._transfer(one, width)
        if height >= _FULL_GRID:
            rows += self._legend(width)
        return rows

    def _transfer(self, one: TransferPicture, width: int) -> list[Text]:
        signs = self._signs
        rows = [self._transfer_title(one, width)]
        room = width - 6
        per_layer = 3 if 3 * len(one.layers) <= room else 2 if 2 * len(one.layers) <= room else 1
        per_row = max(1, room // per_layer)
        for first in range(0, len(one.layers), per_row):
            cells = [
                (signs.states[s] * max(1, per_layer - 1) + " " * (per_layer > 1), STYLES[s])
                for s in one.layers[first : first + per_row]
            ]
            rows.append(line((f"{first:>4}  ", "dim"), *cells))
        if one.error is not None:
            rows.append(line((f"      {plain(one.error, signs)}", "red")))
        return rows

    def _transfer_title(self, one: TransferPicture, width: int) -> Text:
        """How many layers are where, and as much of the rest as fits."""
        counts = Counter[str](one.layers)
        states = fitting((f"{counts[s]} {s}" for s in _STATE_ORDER if counts[s]), width - 6)
        done = units.size(one.num_bytes_done)
        if one.num_bytes and one.num_bytes_done < one.num_bytes:
            done += f" of {units.size(one.num_bytes)}"
        if one.seconds is not None:
            done += f" in {units.seconds(one.seconds)}"
        pieces = [one.way]
        if one.num_requests:
            pieces.append(f"{one.num_requests} request{'s' * (one.num_requests != 1)}")
        if one.num_blocks:
            pieces.append(f"{units.count(one.num_blocks)} block{'s' * (one.num_blocks != 1)}")
        pieces.append(done)
        room = width - 6 - len(states) - 2
        while pieces and len(", ".join(pieces)) > room:
            del pieces[0]
        numbers = ", ".join(pieces)
        gap = " " * max(2, room + 2 - len(numbers))
        return line((f"{one.kind:<6}", "bold"), states, gap, numbers)

    def _legend(self, width: int) -> list[Text]:
        signs = self._signs
        cells: list[tuple[str, str]] = []
        for state, sign in signs.states.items():
            cells += [(sign, STYLES[state]), (f" {state} ", "dim")]
        return [crop(line("      ", *cells), width)]

    # ---------------------------------------------------------------- lanes

    def _lanes(self, width: int) -> list[Text]:
        connector, rates = self._connector, self._frame.rates
        link = None if connector is None else connector.link_bytes_per_s
        hidden = (
            None if connector is None or connector.load is None else connector.load.hidden_share
        )
        said = [f"link {units.speed(link)}, measured"] if link else []
        if hidden is not None:
            said.append(f"{units.share(hidden)} of the load hidden")
        rows = [title("lanes", width, self._signs, ", ".join(said), said[-1] if said else "")]
        room = self._lane_bar(width)
        if connector is not None and connector.lanes:
            newest = connector.load.gb_per_s if connector.load is not None else None
            rows.append(self._lane("load", ("load", "bulk"), newest, link, width))
        busy = f" {units.share(rates.busy_share):>5} busy"
        rows.append(
            line(f"{'compute':<{_LABEL}}", *bar(rates.busy_share, room, self._signs, "green"), busy)
        )
        if connector is not None and connector.lanes:
            newest = connector.save.gb_per_s if connector.save is not None else None
            rows.append(self._lane("store", ("store",), newest, link, width))
        return rows

    @staticmethod
    def _lane_bar(width: int) -> int:
        return max(4, width - _LABEL - 42)

    def _lane(
        self, name: str, lanes: Sequence[str], newest: float | None, link: float | None, width: int
    ) -> Text:
        """The newest transfer's speed against the link; what flows now; what has flowed."""
        connector, room = self._connector, self._lane_bar(width)
        assert connector is not None
        own = [one for one in connector.lanes if one.name in lanes]
        flow = sum(self._shown.flow.get((connector.name, one.name), 0.0) for one in own)
        of_link = None if newest is None or not link else newest * 1e9 / link
        speed = units.speed(None if newest is None else newest * 1e9)
        total = units.size(sum(one.num_bytes for one in own))
        sign = "*" if any(one.is_busy for one in own) else " "
        pieces = (
            f" {units.share(of_link):>5}",
            f" {speed:>10}",
            f" {units.speed(flow) + ' now':>13}",
            f" {total:>9}",
        )
        return line(
            f"{name:<{_LABEL - 1}}",
            (sign, "yellow"),
            *bar(of_link, room, self._signs, "cyan"),
            fitting(pieces, width - _LABEL - room, ""),
        )

    # ---------------------------------------------------------------- blocks

    def _pool(self, width: int) -> list[Text]:
        found = self._snapshot
        used = found.num_usable_blocks - found.num_free_blocks
        share = used / found.num_usable_blocks if found.num_usable_blocks else None
        pieces = [
            f"{units.count(used)}/{units.count(found.num_usable_blocks)} held",
            f"{units.count(found.num_cached_blocks)} cached",
        ]
        if found.num_fenced_blocks:
            pieces.append(f"{units.count(found.num_fenced_blocks)} fenced")
        rows = [title("blocks", width, self._signs, f"{found.block_size} tokens each")]
        return [*rows, self._blocks("pool", share, "green", pieces, width)]

    def _blocks(
        self, name: str, share: float | None, style: str, pieces: Sequence[str], width: int
    ) -> Text:
        """How full it is, and as many of the pieces as fit."""
        small = min(40, max(4, width - _LABEL - 60))  # beside many words
        said = fitting(pieces, width - _LABEL - small - 1)
        return line(f"{name:<{_LABEL}}", *bar(share, small, self._signs, style), f" {said}")

    def _tiers(self, width: int) -> list[Text]:
        tiers = () if self._connector is None else self._connector.tiers
        return [self._tier(tier, width) for tier in tiers]

    def _tier(self, tier: TierPicture, width: int) -> Text:
        share = tier.num_blocks / tier.num_room if tier.num_room else None
        used = units.count(tier.num_blocks)
        if tier.num_room is not None:
            used += f"/{units.count(tier.num_room)}"
        unit = "" if tier.evicted_unit == "blocks" else f" {tier.evicted_unit}"
        pieces = [
            used,
            f"{units.count(tier.num_hits)} hits",
            f"{units.count(tier.num_evicted)}{unit} evicted",
        ]
        if tier.drops:
            reasons = tier.drops.items()
            told = [f"{units.count(n)} {plain(why, self._signs)}" for why, n in reasons]
            pieces += [f"dropped: {told[0]}", *told[1:]]
        return self._blocks(plain(tier.name, self._signs), share, "blue", pieces, width)

    # ---------------------------------------------------------------- the GPU

    def _gpu(self, width: int) -> list[Text]:
        gpu = self._shown.gpu
        if gpu is None:
            return []
        label = f"{'gpu':<{_LABEL}}"
        if isinstance(gpu, Unknown):
            return [line(label, (fitted(plain(gpu.reason, self._signs), width - _LABEL), "dim"))]
        pieces: list[str] = []
        if not isinstance(gpu.busy_share, Unknown):
            pieces.append(f"{units.share(gpu.busy_share)} busy")
        if not isinstance(gpu.memory_used_bytes, Unknown):
            total = gpu.memory_total_bytes
            of_all = "" if isinstance(total, Unknown) else f"/{units.size(total)}"
            pieces.append(f"{units.size(gpu.memory_used_bytes)}{of_all}")
        into, out = gpu.received_bytes_per_s, gpu.sent_bytes_per_s
        if not isinstance(into, Unknown) and not isinstance(out, Unknown):
            pieces.append(f"PCIe in {units.speed(into)} out {units.speed(out)}")
        if not isinstance(gpu.power_w, Unknown):
            limit = gpu.power_limit_w
            of_limit = "" if isinstance(limit, Unknown) else f"/{limit:.0f}"
            pieces.append(f"{gpu.power_w:.0f}{of_limit} W")
        if not gpu.is_certain:
            pieces.append(f"(number {gpu.index} of {gpu.num_gpus}: a guess)")
        said = fitting(pieces, width - _LABEL, "   ")
        return [line(label, said if pieces else "the driver tells nothing of it")]

    # ---------------------------------------------------------------- requests

    def _requests(self, width: int, height: int) -> list[Text]:
        frame, snapshot = self._frame, self._snapshot
        said = f"{frame.num_running} running, {frame.num_waiting} waiting"
        if snapshot.num_preparing_requests:
            said += f", {snapshot.num_preparing_requests} tokenised"
        rows = [title("requests", width, self._signs, said)]
        some = [*snapshot.running, *snapshot.waiting]
        if not some or height < 3:
            return rows
        room = height - 2
        all_of_them = frame.num_running + frame.num_waiting
        cut = some if all_of_them <= room else some[: max(0, room - 1)]
        rows.append(line((self._columns("request", {n: n for n, _ in _COLUMNS}, width), "dim")))
        for one in cut:
            name = plain(one.request_id, self._signs)
            rows.append(line(self._columns(name, self._request(one), width)))
        if len(cut) < all_of_them:
            rows.append(line((f"and {units.count(all_of_them - len(cut))} more", "dim")))
        return rows

    @staticmethod
    def _request(one: RequestSnapshot) -> dict[str, str]:
        """By column."""
        local, external = one.num_local_cached_tokens, one.num_external_cached_tokens
        state = {"WAITING_FOR_REMOTE_KVS": "loading"}.get(one.status, one.status.lower())
        is_prompt = one.num_computed_tokens < one.num_prompt_tokens
        if one.status == "RUNNING":
            state = "answers" if one.num_generated_tokens else "computes"
            if is_prompt:
                state = f"at {units.count(one.num_computed_tokens)}"
        numbers = {
            "prompt": one.num_prompt_tokens,
            "local": local,
            "loaded": external,
            "new": max(0, one.num_prompt_tokens - local - external),
            "answer": one.num_generated_tokens,
            "blocks": one.num_blocks,
        }
        return {"state": state, **{name: units.count(n) for name, n in numbers.items()}}

    @staticmethod
    def _columns(name: str, cells: Mapping[str, str], width: int) -> str:
        """As many as there is room for; `name` has the rest."""
        widths = dict(_COLUMNS)
        for left_out in _LEFT_OUT_FIRST:
            if _LEAST_ID + 1 + sum(widths.values()) <= width:
                break
            del widths[left_out]
        id_width = max(_LEAST_ID, width - 1 - sum(widths.values()))
        texts = [fitted(cells[one], w, right=one != "state") for one, w in widths.items()]
        return fitted(name, id_width) + " " + "".join(texts)

    # ---------------------------------------------------------------- stores

    def _stores(self, width: int) -> list[Text]:
        rows: list[Text] = self._pool(width)
        found = self._snapshot.stats
        rows.append(
            line(
                f"{'':<{_LABEL}}{units.count(found.num_prompt_tokens)} prompt tokens:"
                f" {units.count(found.num_local_cached_tokens)} local,"
                f" {units.count(found.num_external_cached_tokens)} loaded;"
                f" {units.count(found.num_generated_tokens)} generated"
            )
        )
        rows.append(
            line(
                f"{'':<{_LABEL}}{units.count(found.num_finished_requests)} requests ended,"
                f" {units.count(found.num_preemptions)} preemptions,"
                f" {units.count(found.num_invalid_blocks)} bad blocks"
            )
        )
        for connector in self._snapshot.connectors:
            rows += self._store_of(connector, width)
        counted = self._snapshot.kv_connector_stats
        if counted:
            rows.append(title("counted in the last 10 to 20 s", width, self._signs))
            pieces = [
                f"{plain(name, self._signs)} {units.count(n)}"
                for name, n in sorted(counted.items())
            ]
            rows += [line(row) for row in wrapped(pieces, width)]
        return rows

    def _store_of(self, connector: ConnectorPicture, width: int) -> list[Text]:
        rows = [title(plain(connector.name, self._signs), width, self._signs)]
        if connector.error is not None:
            rows.append(line((f"  {plain(connector.error, self._signs)}", "red")))
        for tier in connector.tiers:
            rows.append(self._tier(tier, width))
            held = units.size(tier.num_blocks * tier.block_bytes)
            rows.append(
                line(
                    f"{'':<{_LABEL}}{held}, {units.count(tier.num_stored)} blocks came"
                    f" here, {units.size(tier.block_bytes)} each"
                )
            )
        for lane in connector.lanes:
            state = "busy" if lane.is_busy else "idle"
            rows.append(
                line(f"{'lane ' + lane.name:<11}{state}, {units.size(lane.num_bytes)} so far")
            )
        return rows


def _and_one(name: str, usual: float | None, other: str, value: float | None) -> str:
    """A time and a special one; without any there is no special one."""
    said = f"{name} {units.seconds(usual)}"
    return said if usual is None and value is None else f"{said} ({other} {units.seconds(value)})"


def summary(shown: Shown) -> str:
    """One line, for who reads a pipe."""
    frame = shown.frame
    rates, snapshot = frame.rates, frame.snapshot
    used = snapshot.num_usable_blocks - snapshot.num_free_blocks
    pieces = [
        f"{units.rate(rates.generated_per_s)} tokens/s",
        f"step {units.seconds(rates.step_s)}",
        f"first token {units.seconds(rates.first_token_s)}",
        f"lag {units.seconds(rates.loop_lag_s)}",
        f"busy {units.share(rates.busy_share)}",
        f"running {frame.num_running}",
        f"waiting {frame.num_waiting}",
        f"blocks {used}/{snapshot.num_usable_blocks}",
    ]
    for connector in snapshot.connectors:
        pieces += _summary_of(connector)
    gpu = shown.gpu
    if gpu is not None and not isinstance(gpu, Unknown) and not isinstance(gpu.busy_share, Unknown):
        pieces.append(f"gpu {units.share(gpu.busy_share)}")
    if shown.num_lost:
        pieces.append(f"lost {shown.num_lost} frames")
    if snapshot.dead is not None:
        pieces.append(plain(snapshot.dead, ASCII))
    return f"{frame.engine.pid}  " + "  ".join(pieces)


def _summary_of(connector: ConnectorPicture) -> list[str]:
    pieces: list[str] = []
    for one in (connector.load, connector.save):
        if one is None:
            continue
        counts = Counter[str](one.layers)
        done = max(counts, key=counts.__getitem__, default="waiting")
        said = f"{one.kind} {counts[done]}/{len(one.layers)} {done}"
        if one.gb_per_s is not None:
            said += f" {units.speed(one.gb_per_s * 1e9)}"
        if one.hidden_share is not None:
            said += f" {units.share(one.hidden_share)} hidden"
        pieces.append(said)
    for tier in connector.tiers:
        pieces.append(f"{plain(tier.name, ASCII)} {tier.num_blocks} blocks {tier.num_hits} hits")
    return pieces
