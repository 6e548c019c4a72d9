"""The published model of a rank: the model that peers may have, and where the rank stands.

Three callers share this state, each in a thread of its own. Each of them has a port with the
operations that it may use, and gets no other one:

- `trainer_port`: the thread that trains. It publishes the model at the end of a step, arrives at
  versions, and takes what averages have made of the model.
- `protocol_port`: the thread that runs the averaging protocol. It asks for contributions and
  snapshots, and hands over averages.
- `membership_port`: what runs the protocol through the generations (`progress_thread`).

The state has three components, which change independently.

**The model.**

    EMPTY      There is no model: the training has not begun, or a checkpoint was loaded.
    PUBLISHED  Peers may have the model.
    EXPELLED   This rank is not a member. Its trainer continues alone, with its own model.

    event                              from             to
    trainer.begin                      EMPTY            PUBLISHED, with the trainer's model
    trainer.forget                     PUBLISHED        EMPTY
    membership.expel                   any              EXPELLED
    membership.adopt                   any              PUBLISHED, with a member's model
    protocol.receive_model             EMPTY, EXPELLED  PUBLISHED, with a member's model
    membership.continue_without_model  EXPELLED         PUBLISHED, with the rank's own model
    membership.continue_without_model  EMPTY            failed
    membership.fail                    any              failed

A rank may be EXPELLED without a model, too; `continue_without_model` then fails as from EMPTY.
After a failure, every later call of the trainer that could wait raises the error.

**The arrival of the trainer.**

    COMPUTING    The trainer has arrived at no version whose average is still to come.
    ARRIVED(v)   It has arrived at version v. Its contribution is fresh.
    QUORUM(v)    Enough ranks have arrived at v; the average depends on the network alone.

    event                         from                   to
    trainer.arrive                COMPUTING              ARRIVED(v)
    protocol.quorum_arrived(v)    ARRIVED(v)             QUORUM(v)
    protocol.close(v)             ARRIVED(v), QUORUM(v)  COMPUTING
    membership.begin_generation   any                    COMPUTING

`trainer.arrive` waits for COMPUTING, or returns without an arrival. `trainer.wait` waits for
COMPUTING, or, where the average may come later, for QUORUM.

**Each version.**

    event                           from      to
    protocol.contribute(v)          unknown   open: a contribution of this rank is under way
    protocol.close(v)               open      closed: the averages that came are merged
    protocol.merge_late(v)          closed    closed: an average that came late is merged
    protocol.finalize_version(v)    closed    final: nothing more will come
    membership.begin_generation     any       unknown: versions are numbered anew

The trainer is due to arrive after so many steps as `interval_choice` says, or when a version has
begun that waits for arrivals (`protocol.invite`).

Besides, the protocol may *hold* the trainer: `trainer.wait_for_late` waits until the members that
it names have ended their steps (`protocol.hold`). A rank whose step end is awaited like that knows
so (`protocol.await_step`) and tells its peers, also where it skips an arrival
(`membership.take_awaited`).

With `one_at_a_time` a rank has at most one open version, because two averages that both contain one
snapshot of its model would move the model twice. Then it also takes part in about one version for
each of its steps, which bounds its traffic: every contribution that was made on its behalf while it
was computing gives it a *credit*, and for each credit it skips one arrival. `membership.quiesce`
ends all this before a generation changes: no version opens any more.
"""

from __future__ import annotations

from offbeat.averaging.background.interface import ProtocolPort
from offbeat.averaging.background.interval_choice import IntervalChoice
from offbeat.averaging.background.membership_port import MembershipPort
from offbeat.averaging.background.model_state import ModelState
from offbeat.averaging.background.protocol_port import PublishedModelPort
from offbeat.averaging.background.published_state import PublishedState
from offbeat.averaging.background.trainer_port import TrainerPort


class PublishedModel(PublishedState):
    """The state and its three ports.

    Attributes:
        trainer, protocol, membership: the ports.
    """

    def __init__(
        self,
        model: ModelState,
        *,
        one_at_a_time: bool = True,
        max_credit: int = 20,
        intervals: IntervalChoice | None = None,
    ) -> None:
        super().__init__(
            model, one_at_a_time=one_at_a_time, max_credit=max_credit, intervals=intervals
        )
        self.trainer = TrainerPort(self)
        self.protocol: ProtocolPort = PublishedModelPort(self)
        self.membership = MembershipPort(self)
