"""Which Router is next, by a clock that stands still."""

from headrace.client.targets import DOWN_S, Targets, Turn
from headrace.control.client_throttle import ThrottlePolicy


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def targets(count: int, clock: Clock, throttle: ThrottlePolicy | None = None, draw: float = 0.0) -> Targets:
    return Targets(count, throttle, clock, lambda: draw)


def test_requests_take_turns_and_calls_move_on() -> None:
    fleet = targets(3, Clock())
    turns = [fleet.turn() for _ in range(4)]
    assert [[turn.next() for _ in range(4)] for turn in turns] == [
        [0, 1, 2, 0],
        [1, 2, 0, 1],
        [2, 0, 1, 2],
        [0, 1, 2, 0],
    ]


def test_the_first_is_drawn() -> None:
    assert [targets(4, Clock(), draw=draw).turn().next() for draw in (0.0, 0.3, 0.5, 0.999)] == [0, 1, 2, 3]


def test_a_router_that_was_lost_is_passed_over_for_a_while() -> None:
    clock = Clock()
    fleet = targets(2, clock)
    turn = fleet.turn()
    assert turn.next() == 0
    turn.lost()
    assert turn.next() == 1
    assert [fleet.turn().next() for _ in range(4)] == [1, 1, 1, 1]
    clock.now += DOWN_S
    assert sorted(fleet.turn().next() for _ in range(2)) == [0, 1]


def test_one_that_answers_is_back_at_once_and_refusals_are_answers() -> None:
    for sign in (Turn.answered, Turn.shed):
        fleet = targets(2, Clock())
        turn = fleet.turn()
        turn.next()
        turn.lost()
        sign(turn)
        assert sorted(fleet.turn().next() for _ in range(2)) == [0, 1]


def test_where_all_are_lost_they_still_take_turns() -> None:
    fleet = targets(2, Clock())
    for _ in range(2):
        turn = fleet.turn()
        turn.next()
        turn.lost()
    turn = fleet.turn()
    assert [turn.next() for _ in range(3)] == [0, 1, 0]


def test_each_router_has_a_throttle_of_its_own() -> None:
    fleet = targets(2, Clock(), ThrottlePolicy(refusals_min=0))
    for _ in range(9):
        turn = fleet.turn()
        turn.index = 0
        assert turn.send(is_retry=True)
        turn.shed()
        turn.shed()  # a call is refused once
    turn.index = 0
    assert not turn.send(is_retry=False)
    turn.index = 1
    assert turn.send(is_retry=False)


def test_without_a_throttle_all_is_sent_and_retried() -> None:
    turn = targets(1, Clock()).turn()
    turn.next()
    for _ in range(500):
        assert turn.send(is_retry=False)
        turn.shed()
        assert turn.retry()
