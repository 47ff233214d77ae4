"""What single rules of the core say, event by event."""

from __future__ import annotations

from typing import Any

from adacheck_store.agent import events as ev
from adacheck_store.agent.budget import BEYOND_WINDOW, Budget, memory_for
from adacheck_store.agent.core import HOLD_S, AgentCore, AgentSettings
from adacheck_store.agent.drains import BATCH
from adacheck_store.agent.leases import LEASE_S, Lease
from adacheck_store.agent.marks import Mark, Report, Seat, both, newest_common
from adacheck_store.agent.replica import FAR, LMDB, RAM, make_replica
from adacheck_store.catalog import RecordRef
from adacheck_store.format.manifest import Manifest, PartEntry

P, R = "p000000", "r000000"
T1, T2 = "t000001-" + "0" * 16, "t000002-" + "0" * 16
FIRST = Manifest(
    run="r", term=T1, step=0, parts=(PartEntry(name=P, layout="l"),), ranks=(R,)
)  # fmt: skip
SECOND = Manifest(
    run="r", term=T2, step=2, parts=FIRST.parts, ranks=(R,), parent_term=T1, fork_step=2,
    tips={P: "d2"},
)  # fmt: skip


def ref(kind: str, step: int, term: str = T1, **fields: Any) -> RecordRef:
    """A record of the chain d1, d2, ...; bases are captured unless said otherwise."""
    start = "m1" if term == T1 else "m2"
    link = f"d{step}" if step else start
    before = f"d{step - 1}" if step > 1 and not (term == T2 and step == 3) else start
    plain: dict[str, Any] = {
        "key": f"{term}/{kind}{step}", "kind": kind, "term": term,
        "part": R if kind == "extra" else P,
        "step": step, "id": link if kind == "delta" else f"{kind}{step}", "manifest": start,
        "parent": {"base": link, "delta": before, "extra": ""}[kind], "layout": "l", "tiers": (),
        "nbytes": {"base": 100, "delta": 10, "extra": 1}[kind],
        "origin": "captured" if kind == "base" else "",
    }  # fmt: skip
    return RecordRef(**{**plain, **fields})


def opened(term: str = T1, k: int = 1, token: str = "open") -> ev.Opened:
    """The run's opening at nodes a, b and c, held by a and b."""
    manifests = {"m1": FIRST} if term == T1 else {"m1": FIRST, "m2": SECOND}
    seat = Seat(0, ("a", "b"))
    return ev.Opened(
        term=term, manifests=manifests, seats={P: seat, R: seat},
        domains={"a": "A", "b": "B", "c": "C"}, k=k, reserve={P: (100, 10), R: (0, 1)},
        token=token,
    )  # fmt: skip


def core(node: str = "a", total: int = 10_000, **settings: Any) -> AgentCore:
    """An agent that knows of the term."""
    made = AgentCore(node, f"{node}#1", Budget(total), AgentSettings(**settings))
    made.handle(opened(token=""), 0.0)
    made.handle(ev.Surveyed(T1, ()), 0.0)
    return made


def put(agent: AgentCore, *refs: RecordRef, now: float = 0.0, conn: str = "c") -> list[ev.Command]:
    """A trainer's put that is let in; what follows from it."""
    (admit,) = [c for c in agent.handle(ev.Offered("t", refs, T1), now) if isinstance(c, ev.Admit)]
    return agent.handle(ev.Stored("t", refs, admit.place, conn), now)


def report(node: str, spans: tuple[tuple[int, int], ...], **fields: Any) -> ev.Heard:
    """A peer's report: it can produce the same steps of part and extra."""
    last = spans[-1][1] if spans else -1
    mark = Mark(T1, spans, "", last - 1 if last else last)
    plain: dict[str, Any] = {
        "node": node, "boot": f"{node}#1", "term": T1, "seats": {}, "marks": {P: mark, R: mark},
    }  # fmt: skip
    return ev.Heard(Report(**{**plain, **fields}))


def of(kind: type, commands: list[ev.Command]) -> list[Any]:
    """The commands of a kind."""
    return [command for command in commands if isinstance(command, kind)]


def test_a_sync_is_answered_when_all_live_holders_can_produce() -> None:
    agent = core()
    put(agent, ref("base", 0), ref("extra", 0))
    out = agent.handle(report("b", ()), 0.1)
    assert of(ev.Forward, out) == [ev.Forward("b", (ref("base", 0), ref("extra", 0)))]
    assert not of(ev.Answer, agent.handle(ev.Sync("s", "c", 9.0), 0.1))
    (answer,) = of(ev.Answer, agent.handle(report("b", ((0, 0),)), 0.2))
    assert answer == ev.Answer("s", (("a", "a#1"), ("b", "b#1")), short=False)
    assert agent.view.exposed(0.2) == {}


def test_a_silent_holder_is_not_waited_for_and_the_answer_says_so() -> None:
    agent = core()
    put(agent, ref("base", 0), ref("extra", 0))
    agent.handle(ev.Sync("s", "c", 9.0), 0.1)
    assert not of(ev.Answer, agent.handle(ev.Tick(), 2.9))
    (answer,) = of(ev.Answer, agent.handle(ev.Tick(), 3.1))
    assert answer == ev.Answer("s", (("a", "a#1"),), short=True)
    assert agent.view.exposed(3.1) == {P: 1, R: 1}
    assert agent.view.watermark == -1


def test_a_sync_waits_for_the_own_agent_too() -> None:
    """A peer that can produce a step is not enough, even where there is no room here for more."""
    agent = core(total=10)
    assert P in agent.view.refused
    put(agent, ref("delta", 1))
    agent.handle(ev.Sync("s", "c", 20.0), 0.0)
    assert not of(ev.Answer, agent.handle(report("b", ((0, 1),)), 0.1))
    (answer,) = of(ev.Answer, agent.handle(ev.Stored("", (ref("base", 0),), LMDB), 0.2))
    assert ("a", "a#1") in answer.holders


def test_need_base_is_said_at_once_where_nobody_has_what_is_missing() -> None:
    agent = core()
    agent.handle(report("b", ()), 0.1)
    agent.handle(report("c", ()), 0.1)
    put(agent, ref("delta", 5), ref("extra", 5), now=0.2)
    (refused,) = of(ev.Refuse, agent.handle(ev.Sync("s", "c", 9.0), 0.2))
    assert (refused.token, refused.why) == ("s", "base")


def test_a_base_is_not_asked_for_while_a_peer_may_bring_it() -> None:
    agent = core()
    agent.handle(report("b", ((0, 4),)), 0.1)
    put(agent, ref("delta", 5), ref("extra", 5), now=0.2)
    assert not of(ev.Refuse, agent.handle(ev.Sync("s", "c", 1.0), 0.2))
    (refused,) = of(ev.Refuse, agent.handle(ev.Tick(), 1.0))
    assert refused.why == "time"


def test_a_sync_of_what_another_process_was_given_is_refused() -> None:
    (refused,) = of(ev.Refuse, core().handle(ev.Sync("s", "c", 9.0), 0.1))
    assert refused.why == "lost"


def test_an_older_term_is_refused() -> None:
    agent = core()
    agent.handle(opened(T2), 0.1)
    (refused,) = of(ev.Refuse, agent.handle(ev.Offered("t", (ref("delta", 9),), T1), 0.2))
    assert refused == ev.Refuse("t", "term", f"term {T2} has the run")
    assert of(ev.Refuse, agent.handle(opened(T1, token="late"), 0.2))[0].why == "term"


def test_who_waits_is_refused_when_a_newer_term_begins() -> None:
    """Its steps are others than those of the same number in the new term."""
    agent = core(total=2 * 100 + 5 * 11, places=0)
    for step in range(5):
        put(agent, ref("delta", step + 1), ref("extra", step + 1))
    agent.handle(ev.Offered("x", (ref("delta", 6),), T1), 1.0)
    agent.handle(ev.Sync("s", "c", 99.0), 1.0)
    agent.handle(report("c", ((0, 0),)), 1.0)  # who may still bring the base
    refused = of(ev.Refuse, agent.handle(opened(T2), 1.1))
    assert {(said.token, said.why) for said in refused} == {("x", "term"), ("s", "term")}


def test_attach_is_refused_with_the_bytes_it_needs() -> None:
    agent = AgentCore("a", "a#1", Budget(200), AgentSettings(window=2))
    (refused,) = agent.handle(opened(), 0.0)
    need = 2 * 100 + (2 + BEYOND_WINDOW) * 11
    assert refused.why == "budget"
    assert f"{memory_for(need) >> 20} MiB are needed" in refused.message
    assert of(ev.Answer, AgentCore("a", "", Budget(need), AgentSettings()).handle(opened(), 0.0))


def test_runs_share_a_budget_and_keep_their_reserves() -> None:
    budget = Budget(1000)
    one, other = budget.share(), budget.share()
    assert one.reserve({P: (100, 10), R: (0, 1)}, 2) == 0  # 155, and 100 for a base to come in
    assert other.reserve({P: (300, 50)}, 2) == 5  # 550, of 545 left beside an incoming 300
    assert other.reserve({P: (300, 40)}, 2) == 0
    assert not other.admit({P: (301, 346)})  # its reserve and what nobody has, less a base of 300
    assert other.admit({P: (300, 245)})
    assert not other.admit({P: (0, 1)})
    assert one.admit({P: (100, 50)})
    assert not other.admit({P: (300, 0)})  # its deltas have more than their reserve
    assert other.admit_fold(P, 300)  # the incoming one
    assert not one.admit({P: (1, 0)})
    assert (budget.used, budget.missing()) == (995, 0)
    budget.give_up(other)
    assert (budget.used, one.admit({P: (100, 0)})) == (150, True)


def test_a_captured_base_comes_in_if_a_delta_can_follow() -> None:
    budget = Budget(2 * 100 + 5 * 11 + 9)
    share = budget.share()
    assert share.reserve({P: (100, 10), R: (0, 1)}, 2) == 0
    assert share.admit({P: (100, 0), R: (0, 1)})
    assert share.admit({P: (0, 41), R: (0, 2)})
    assert not share.admit({P: (100, 0), R: (0, 1)})
    share.give_back({P: (0, 1)})
    assert share.admit({P: (100, 0), R: (0, 1)})
    assert share.admit({P: (0, 10)})
    assert not share.admit({P: (0, 1)})


def test_a_watermark_of_fewer_holders_is_not_told() -> None:
    """What one node finds without a holder that it cannot hear is no fact for those that can."""
    agent = core()
    put(agent, ref("base", 0), ref("extra", 0))
    put(agent, ref("delta", 1), ref("extra", 1))
    agent.handle(report("b", ((0, 0),)), 0.1)
    assert (agent.view.watermark, agent.view.report().watermark) == (0, 0)
    put(agent, ref("delta", 2), ref("extra", 2), now=40.0)
    agent.handle(ev.Tick(), 40.0)
    agent.handle(ev.Tick(), 40.5)
    assert agent.view.seats[P].holders == ("a",)
    assert (agent.view.watermark, agent.view.report().watermark) == (1, 0)


def test_without_room_an_offer_waits_and_is_then_refused() -> None:
    agent = core(total=2 * 100 + 5 * 11, places=0)
    for step in range(5):
        put(agent, ref("delta", step + 1), ref("extra", step + 1))
    assert not of(ev.Admit, agent.handle(ev.Offered("x", (ref("delta", 6),), T1), 1.0))
    (refused,) = of(ev.Refuse, agent.handle(ev.Tick(), 1.0 + HOLD_S))
    assert (refused.token, refused.why) == ("x", "full")


def test_what_memory_has_no_room_for_goes_to_the_lmdb() -> None:
    agent = core(total=2 * 100 + 5 * 11, places=LMDB)
    for step in range(5):
        put(agent, ref("delta", step + 1), ref("extra", step + 1))
    (admit,) = of(ev.Admit, agent.handle(ev.Offered("x", (ref("delta", 6),), T1), 1.0))
    assert admit.place == LMDB
    agent.handle(ev.Failed("x", full=True), 1.1)
    assert not of(ev.Admit, agent.handle(ev.Offered("y", (ref("delta", 6),), T1), 1.2))


def held(agent: AgentCore) -> set[str]:
    """Keys in memory, less the term."""
    return {
        key.partition("/")[2] for replica in agent.view.replicas.values()
        for key, places in replica.places.items() if places & RAM
    }  # fmt: skip


def to_the_watermark(agent: AgentCore) -> list[ev.Command]:
    """Three steps that peers have too: the watermark is 2."""
    put(agent, ref("base", 0), ref("extra", 0))
    for step in (1, 2, 3):
        put(agent, ref("delta", step), ref("extra", step))
    return agent.handle(report("b", ((0, 3),)), 0.2)


def test_all_is_folded_where_trainers_are_gone() -> None:
    agent = core(places=0, fold_every=100)
    assert not of(ev.Fold, to_the_watermark(agent))
    assert not of(ev.Fold, agent.handle(ev.Tick(), 0.7))
    (fold,) = of(ev.Fold, agent.handle(ev.Tick(attended=False), 1.2))
    assert fold.step == agent.view.watermark == 2


def test_a_holder_without_trainers_folds_many_at_a_time() -> None:
    """Those of the part train on, elsewhere: at every step it would touch the whole state."""
    agent = core("b", places=0, fold_every=100)
    agent.handle(report("a", ((0, 3),)), 0.1)
    refs = [ref("base", 0), ref("extra", 0)]
    refs += [ref(kind, step) for step in (1, 2, 3) for kind in ("delta", "extra")]
    agent.handle(ev.Stored("", tuple(refs), RAM), 0.2)
    assert agent.view.watermark == 2
    assert not of(ev.Fold, agent.handle(ev.Tick(attended=False), 1.2))


def test_the_watermark_folds_and_then_drops() -> None:
    agent = core(places=0, fold_every=1)
    out = to_the_watermark(agent)
    assert agent.view.watermark == 2
    (fold,) = of(ev.Fold, out)
    assert (fold.step, fold.place, [d.step for d in fold.plan.deltas]) == (2, RAM, [1, 2])
    assert held(agent) == {"base0", "delta1", "delta2", "delta3", "extra2", "extra3"}
    replayed = ref("base", 2, origin="replayed")
    (drop,) = of(ev.Drop, agent.handle(ev.Stored(fold.token, (replayed,), RAM), 0.3))
    assert set(drop.keys) == {f"{T1}/base0", f"{T1}/delta1", f"{T1}/delta2"}
    assert held(agent) == {"base2", "delta3", "extra2", "extra3"}
    assert agent.budget.used == 112


def test_what_is_to_be_drained_is_dropped_when_it_is() -> None:
    agent = core(places=LMDB | FAR, fold_every=1, object_lag=2)
    out = to_the_watermark(agent)
    assert not of(ev.Drop, out)
    (fold,) = of(ev.Fold, out)
    out = agent.handle(ev.Stored(fold.token, (ref("base", 2, origin="replayed"),), RAM), 0.3)
    assert not of(ev.Drop, out)
    keys = tuple(f"{T1}/{name}" for name in ("base0", "delta1", "delta2", "extra0", "extra1"))
    out = agent.handle(ev.Drained(LMDB, keys), 0.4)
    assert {key for drop in of(ev.Drop, out) for key in drop.keys} == set(keys)
    assert held(agent) == {"base2", "delta3", "extra2", "extra3"}


def test_a_lease_keeps_everything_until_it_ends() -> None:
    for ends in (lambda agent: agent.handle(ev.Tick(), 0.1 + LEASE_S),
                 lambda agent: agent.handle(opened(T2), 0.4)):  # fmt: skip
        agent = core(places=0, fold_every=1)
        agent.handle(ev.Asked(T2), 0.1)
        assert not of(ev.Drop, to_the_watermark(agent))
        assert not of(ev.Fold, agent.handle(ev.Tick(), 0.3))
        assert of(ev.Drop, ends(agent))


def test_an_older_claim_neither_takes_nor_ends_a_lease() -> None:
    lease = Lease()
    lease.ask(T2, 0.0)
    lease.ask(T1, 50.0)
    assert not lease.frozen(LEASE_S)
    lease.ask(T2, 50.0)
    lease.opened(T1)
    assert lease.frozen(100.0)
    lease.opened(T2)
    assert not lease.frozen(100.0)


def test_a_fold_that_differs_asks_for_a_base_and_is_not_tried_again() -> None:
    agent = core(places=0, fold_every=1)
    (fold,) = of(ev.Fold, to_the_watermark(agent))
    out = agent.handle(ev.Failed(fold.token, last_match=1), 0.3)
    assert of(ev.AskBase, out) == [ev.AskBase(P, 2)]
    assert not of(ev.Fold, [*out, *agent.handle(ev.Tick(), 0.4)])


def test_a_spare_takes_the_seat_of_one_that_stays_away_and_is_served() -> None:
    agent = core(places=0)
    put(agent, ref("base", 0), ref("extra", 0))
    agent.handle(ev.Missed("b"), 0.1)
    agent.handle(report("c", ()), 29.9)
    agent.handle(ev.Tick(), 30.0)
    assert agent.view.seats[P].holders == ("a", "b")
    agent.handle(report("c", ()), 30.4)
    agent.handle(ev.Tick(), 30.5)
    assert agent.view.seats[P] == agent.view.seats[R] == Seat(1, ("a", "c"))
    out = agent.handle(report("c", ()), 30.6)
    served = [call for call in of(ev.Forward, out) if call.peer == "c"]
    assert served[0].refs == (ref("base", 0), ref("extra", 0))


def test_who_has_no_room_is_not_waited_for_and_loses_its_seat() -> None:
    agent = core(places=0)
    put(agent, ref("base", 0), ref("extra", 0))
    agent.handle(ev.Sync("s", "c", 9.0), 0.1)
    out = agent.handle(report("b", (), refused=frozenset({P, R})), 0.2)
    assert of(ev.Answer, out) == [ev.Answer("s", (("a", "a#1"),), short=True)]
    agent.handle(ev.Tick(), 0.5)
    assert agent.view.seats[P].holders == ("a", "c")


def test_only_the_own_node_decides_on_seats() -> None:
    agent = core("b", places=0)
    agent.handle(ev.Tick(), 100.0)
    assert agent.view.seats[P] == Seat(0, ("a", "b"))
    agent.handle(report("a", (), seats={P: Seat(1, ("a", "c"))}), 100.1)
    assert agent.view.seats[P] == Seat(1, ("a", "c"))
    agent.handle(report("c", (), seats={P: Seat(1, ("a", "b"))}), 100.2)
    assert agent.view.seats[P] == Seat(1, ("a", "c"))


def test_a_holder_that_lost_everything_gets_the_whole_chain() -> None:
    agent = core(places=0, fold_every=100)
    to_the_watermark(agent)
    agent.handle(ev.Missed("b"), 1.0)
    out = agent.handle(report("b", (), boot="b#2"), 1.5)
    sent = [call.refs for call in of(ev.Forward, out) if call.refs]
    assert [r.key.partition("/")[2] for r in sent[0]] == [
        "base0", "delta1", "delta2", "extra2", "delta3", "extra3"
    ]  # fmt: skip


def test_what_a_peer_has_not_kept_is_sent_again_at_the_rate_of_polls() -> None:
    agent = core(places=0)
    put(agent, ref("base", 0), ref("extra", 0))
    sent = (ref("base", 0), ref("extra", 0))
    assert ev.Forward("b", sent) in agent.handle(report("b", ()), 0.1)
    assert not of(ev.Forward, agent.handle(report("b", ()), 0.2))  # it was refused there
    (poll,) = [call for call in of(ev.Forward, agent.handle(ev.Tick(), 0.7)) if call.peer == "b"]
    assert poll.refs == ()
    assert ev.Forward("b", sent) in agent.handle(report("b", ()), 0.8)
    agent.handle(ev.Missed("b"), 0.9)
    assert ev.Forward("b", sent) in agent.handle(ev.Tick(), 1.4) + agent.handle(
        report("b", ()), 1.5
    )


def test_a_long_chain_goes_in_several_calls() -> None:
    agent = core(places=0, fold_every=1000)
    put(agent, ref("base", 0), ref("extra", 0))
    for step in range(1, 50):
        put(agent, ref("delta", step), ref("extra", step))
    calls: list[ev.Forward] = []
    for _ in range(3):  # whatever it says of what it has got so far
        calls += [call for call in of(ev.Forward, agent.handle(report("b", ()), 0.1)) if call.refs]
    assert [len(call.refs) for call in calls] == [64, 36]
    assert [ref.step for call in calls for ref in call.refs] == sorted(2 * list(range(50)))


def test_what_a_peer_has_sent_is_not_sent_back() -> None:
    agent = core("b", places=0)
    agent.handle(report("a", ()), 0.1)
    refs = (ref("base", 0), ref("extra", 0))
    agent.handle(ev.Offered("t", refs, "", "a"), 0.2)
    out = agent.handle(ev.Stored("t", refs, RAM), 0.2)
    assert not [call for call in of(ev.Forward, out) if call.peer == "a" and call.refs]


def test_what_a_later_term_left_behind_is_dropped() -> None:
    agent = core(places=0, fold_every=100)
    to_the_watermark(agent)
    out = agent.handle(opened(T2), 1.0)
    assert {key for drop in of(ev.Drop, out) for key in drop.keys} == {
        f"{T1}/delta3", f"{T1}/extra3"
    }  # fmt: skip
    replica = agent.view.replicas[P]
    assert replica.mark() == Mark(T2, ((0, 2),), "d2", 2)
    replica.add(ref("delta", 3, T2), RAM)
    assert replica.mark().spans == ((0, 3),)


def test_records_of_a_term_not_heard_of_stay() -> None:
    replica = make_replica(P)
    agent = core()
    replica.follow(agent.view.line, {"m1": FIRST})
    replica.add(ref("delta", 3, T2), RAM)
    assert replica.stray() == []


def test_a_holder_is_sent_the_base_that_a_term_begins_with() -> None:
    """It can produce the fork, by the parent's records: the term's first delta does not follow."""
    agent = core(places=0, fold_every=100)
    to_the_watermark(agent)
    agent.handle(opened(T2), 1.0)
    mine, theirs = agent.view.replicas[P], make_replica(P)
    theirs.follow(agent.view.line, agent.view.opened.manifests)
    for item in mine.refs.values():
        theirs.add(item, RAM)
    assert theirs.mark().newest == 2
    for item in (ref("base", 2, T2, parent="m2", layout="l2"), ref("delta", 3, T2, layout="l2")):
        mine.add(item, RAM)
    assert mine.mark().spans == ((0, 3),)
    for item in mine.lacking(theirs.mark(), 2):
        theirs.add(item, RAM)
    assert theirs.mark() == mine.mark()


def test_so_it_is_by_an_agent_that_has_nothing_of_the_parent() -> None:
    """A node that is new in the term knows by the parent's manifest that the layout is another."""
    agent = core(places=0, fold_every=100)
    to_the_watermark(agent)
    agent.handle(opened(T2), 1.0)
    mine, theirs = make_replica(P), agent.view.replicas[P]
    mine.follow(agent.view.line, agent.view.opened.manifests)
    for item in (ref("base", 2, T2, parent="m2", layout="l2"), ref("delta", 3, T2, layout="l2")):
        mine.add(item, RAM)
    assert theirs.mark().newest == 2
    for item in mine.lacking(theirs.mark(), 2):
        theirs.add(item, RAM)
    assert theirs.mark().newest == mine.mark().newest == 3


def test_a_mark_has_a_hole_where_a_gap_was_declared() -> None:
    agent = core()
    put(agent, ref("base", 0), ref("extra", 0))
    for step in (1, 2, 3):
        put(agent, ref("delta", step), ref("extra", step))
    base = ref("base", 6, parent="m1", gap={"from": 3, "reason": "x"})
    put(agent, base, ref("extra", 6))
    assert agent.view.replicas[P].mark() == Mark(T1, ((0, 2), (6, 6)), "", 5)


def test_two_ids_of_one_step_have_nothing_in_common() -> None:
    one, other = Mark(T1, ((0, 5),), "x", 4), Mark(T1, ((0, 5),), "y", 4)
    assert newest_common([[one, one], [other]]) == 4
    assert newest_common([[one, other]]) == -1


def test_the_newest_common_step_lies_in_every_mark() -> None:
    holed = Mark(T1, ((0, 2), (6, 9)), "", 8)
    assert newest_common([[holed], [Mark(T1, ((0, 7),), "", 6)]]) == 6
    assert newest_common([[holed], [Mark(T1, ((0, 5),), "", 4)]]) == 2
    assert newest_common([[holed], [Mark(T1, ((3, 5),), "", 4)]]) == -1


def test_drains_wait_for_half_the_lag_and_failed_ones_are_tried_again() -> None:
    agent = core(places=FAR, object_lag=6)
    (first,) = of(ev.Drain, put(agent, ref("base", 0), ref("extra", 0)))  # a base goes at once
    assert not of(ev.Drain, agent.handle(ev.Drained(FAR, first.keys), 0.1))
    for step in (1, 2):
        assert not of(ev.Drain, put(agent, ref("delta", step), ref("extra", step), now=0.2))
    (drain,) = of(ev.Drain, put(agent, ref("delta", 3), ref("extra", 3), now=0.3))
    assert len(drain.keys) == 6
    assert not of(ev.Drain, agent.handle(ev.Drained(FAR, ()), 0.5))
    assert of(ev.Drain, agent.handle(ev.Tick(), 62.0)) == [drain]


def test_a_drain_is_of_so_many_records_and_one_at_a_time() -> None:
    """Whatever has gathered: room and time that a drain takes do not grow with the backlog."""
    agent = core(places=FAR)
    (first,) = of(ev.Drain, put(agent, ref("base", 0), ref("extra", 0)))
    commands = [
        command for step in range(1, BATCH + 2)
        for command in put(agent, ref("delta", step), ref("extra", step), now=0.1)
    ]  # fmt: skip
    assert not of(ev.Drain, commands)
    (second,) = of(ev.Drain, agent.handle(ev.Drained(FAR, first.keys), 0.2))
    assert not of(ev.Drain, agent.handle(ev.Tick(), 0.3))
    (third,) = of(ev.Drain, agent.handle(ev.Drained(FAR, second.keys), 0.4))
    assert len(second.keys) == len(third.keys) == BATCH
    assert not {*second.keys} & {*third.keys}


def test_what_a_drain_passes_over_is_not_said_to_be_drained() -> None:
    """It lies nowhere below and is not tried again; the far tier is whole again with a base."""
    agent = core(places=FAR, object_lag=2, base_every=64)
    (first,) = of(ev.Drain, put(agent, ref("base", 0), ref("extra", 0)))
    agent.handle(ev.Drained(FAR, first.keys), 0.1)
    (drain,) = of(ev.Drain, put(agent, ref("delta", 1), ref("extra", 1), now=0.2))
    (gone,) = (key for key in drain.keys if key.endswith("delta1"))
    rest = tuple(key for key in drain.keys if key != gone)
    agent.handle(ev.Drained(FAR, rest, passed=(gone,)), 0.3)
    assert agent.view.replicas[P].places[gone] == RAM
    assert agent.drains.behind == 0
    (drain,) = of(ev.Drain, put(agent, ref("delta", 2), ref("extra", 2), now=0.4))
    agent.handle(ev.Drained(FAR, drain.keys), 0.5)
    assert agent.far.newest(P) == 0
    replayed = ref("base", 2, origin="replayed")  # of no multiple, and drained all the same
    (drain,) = of(ev.Drain, agent.handle(ev.Stored("", (replayed,), RAM), 0.6))
    assert replayed.key in drain.keys
    agent.handle(ev.Drained(FAR, drain.keys), 0.7)
    assert agent.far.newest(P) == 2


def test_a_base_of_what_cannot_be_produced_here_is_drained() -> None:
    """A process that died had deltas that others have folded over: nothing else fills that hole."""
    agent = core()
    put(agent, ref("base", 0), ref("extra", 0))
    put(agent, ref("delta", 1), ref("extra", 1))
    given = ref("base", 3, origin="replayed"), ref("extra", 3)
    (admit,) = of(ev.Admit, agent.handle(ev.Offered("p", given, "", "b"), 1.0))
    agent.handle(ev.Drained(FAR, agent.drains._queues[1].busy), 1.0)
    out = agent.handle(ev.Stored("p", given, admit.place), 1.0)
    assert given[0].key in [key for drain in of(ev.Drain, out) if drain.place == FAR
                            for key in drain.keys]  # fmt: skip
    folded = ref("base", 1, origin="replayed")  # of what is here, and on its way
    assert not any(folded.key in drain.keys for drain in of(
        ev.Drain, agent.handle(ev.Stored("", (folded,), RAM), 3.0)))  # fmt: skip


def test_exposed_is_what_too_few_can_produce() -> None:
    """Not a step that is on its way, also where it closes a gap: the one before it counts then."""
    agent = core()
    put(agent, ref("base", 0), *(ref("delta", step) for step in (1, 2)))
    put(agent, *(ref("extra", step) for step in (0, 1, 2)))
    agent.handle(report("b", ((0, 0),)), 0.1)
    assert agent.view.exposed(0.1) == {P: 1, R: 1}
    agent.handle(report("b", ((0, 1),)), 0.2)
    assert agent.view.exposed(0.2) == {}
    gap = ref("base", 5, gap={"from": 3, "reason": "x"}, parent="m1")
    put(agent, gap, ref("extra", 5), now=0.3)
    assert agent.view.exposed(0.3) == {P: 1, R: 1}
    agent.handle(report("b", ((0, 2),)), 0.4)
    assert agent.view.exposed(0.4) == {}
    agent.handle(report("b", ((0, 2), (5, 5))), 0.5)
    assert agent.view.exposed(0.5) == {}  # the step after 5 has not been yet
    put(agent, ref("delta", 6, parent="m1"), ref("extra", 6), now=0.6)
    assert agent.view.exposed(0.6) == {}
    agent.handle(report("b", ((0, 2),)), 0.7)
    assert agent.view.exposed(0.7) == {P: 1, R: 1}
    assert agent.view.exposed(9.9) == {P: 1, R: 1}


def far(agent: AgentCore, *refs: RecordRef) -> int:
    """The newest step that is drained, once these records are found in the far tier."""
    agent.handle(ev.Surveyed(agent.view.term, refs), 0.0)
    return agent.far.newest(P)


def test_what_is_drained_is_what_the_far_tier_can_produce() -> None:
    """Whoever has put it there, of the part and of the extras, under one of the line's terms."""
    chain = [ref("base", 0), *(ref("delta", step) for step in (1, 2, 3))]
    extras = [ref("extra", step) for step in (0, 1, 2, 3)]
    assert far(core(), *chain, *extras) == 3
    assert far(core(), *chain[:2], *chain[3:], *extras) == 1
    assert far(core(), *chain, *extras[:3]) == 2
    assert far(core(), *chain, *extras[:1], *extras[2:]) == 3
    assert far(core(), *chain) == far(core(), *extras) == far(core(), *chain[1:], *extras) == -1
    assert far(core("b"), *chain, *extras) == -1  # it is not the chains' own node
    agent = core()
    assert far(agent, *chain, *extras) == 3
    asked = of(ev.Survey, agent.handle(opened(T2), 1.0))  # which forks at 2
    assert asked == [ev.Survey(T2, (P, R))]
    assert agent.far.newest(P) == -1
    assert far(agent, *chain, *extras) == 2
    assert far(agent, ref("delta", 3, T2), ref("extra", 3, T2)) == 3


def test_far_tier_is_read_again_until_it_is_read() -> None:
    """Nothing is drained there before, and what it turns out to have is not drained again."""
    agent = AgentCore("a", "a#1", Budget(10_000), AgentSettings(places=FAR))
    assert of(ev.Survey, agent.handle(opened(), 0.0)) == [ev.Survey(T1, (P, R))]
    said = put(agent, ref("base", 0), ref("extra", 0))
    assert not of(ev.Survey, said)
    assert not of(ev.Drain, said)
    assert not of(ev.Survey, agent.handle(ev.Tick(), 0.1))
    assert not of(ev.Survey, agent.handle(ev.Surveyed(T2, None), 0.2))  # of another term
    assert of(ev.Survey, agent.handle(ev.Surveyed(T1, None), 0.3))
    said = agent.handle(ev.Surveyed(T1, (ref("extra", 0),)), 0.4)
    assert [drain.keys for drain in of(ev.Drain, said)] == [(ref("base", 0).key,)]
    assert not of(ev.Survey, agent.handle(ev.Tick(), 0.5))


def test_what_a_gap_disowns_is_not_drained() -> None:
    """The base that tells of it may be here alone: in this term, or since the one before."""
    there = [ref(kind, step) for step in (1, 2, 3) for kind in ("delta", "extra")]
    there += [ref("base", 0), ref("extra", 0)]
    base = ref("base", 4, gap={"from": 3, "reason": "x"}, parent="m1")
    agent = core()
    assert far(agent, *there) == 3
    agent.handle(ev.Stored("", (base,), RAM), 0.0)
    assert agent.far.newest(P) == 2
    agent.handle(ev.Stored("", (ref("extra", 4),), RAM), 0.0)
    agent.handle(ev.Drained(FAR, (base.key, ref("extra", 4).key)), 0.1)
    assert agent.far.newest(P) == 4
    agent = AgentCore("a", "a#2", Budget(10_000), AgentSettings())
    agent.handle(ev.Stored("", (base,), LMDB), 0.0)
    agent.handle(opened(), 0.0)
    assert far(agent, *there) == 2
    agent = AgentCore("a", "a#2", Budget(10_000), AgentSettings())
    late = ref("base", 4, gap={"from": 1, "reason": "x"}, parent="m1")
    agent.handle(ev.Stored("", (late,), LMDB), 0.0)
    agent.handle(opened(T2), 0.0)  # it forks before that base: a writer that was left says so
    assert far(agent, *there) == 2


def test_what_the_far_tier_has_is_forgotten_below_its_base() -> None:
    agent = core(places=FAR, base_every=8, object_lag=2)
    known = []
    for step in range(200):
        kinds = ["base", "extra"] if step == 0 else ["delta", "extra"]
        records = [ref(kind, step) for kind in kinds]
        if step and step % 8 == 0:
            records.append(ref("base", step, origin="replayed"))
        put(agent, *records, now=float(step))
        agent.handle(ev.Drained(FAR, tuple(record.key for record in records)), step + 0.5)
        assert agent.far.newest(P) == step
        known.append(sum(len(chain.refs) for chain in agent.far._chains.values()))
    assert max(known) <= 2 * 9 + 1


def test_common_spans() -> None:
    assert both((), ((0, 9),)) == both(((0, 9),), ()) == ()
    assert both(((0, 3), (5, 9)), ((2, 6), (8, 8), (10, 12))) == ((2, 3), (5, 6), (8, 8))
    assert both(((0, 9),), ((0, 0), (9, 9))) == ((0, 0), (9, 9))
