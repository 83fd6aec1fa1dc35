// Prepare and commit: one sync of one replica of M workers, whose sender, mates and links may fail at any point.
//
// The sender runs its phases; between any two messages that it sends it may crash. A worker may crash, fail by itself,
// or lose its sender although the sender lives (it was silent for dead_after): messages that were under way then may
// still come, or not. Workers that lose the sender ask their mates in rounds. Questions and answers take any time. A
// mate's death is reported truly (answer_within_ns is long enough), perhaps before its last answer arrives.
//
// What each name stands for is in README.md. The lines that begin with "mirrors" are checked against the sources.
//
// mirrors src/protocol/trainer_machine.cc: kStarting kUpdating kFinishing kDraining kStarted kPrepared
// mirrors src/protocol/trainer_machine.cc: kFinished kOver kLost
// mirrors src/protocol/trainer_machine.cc: advance drained drop_replica in_sync drain_timeout_ns
// mirrors src/protocol/trainer_machine.cc: update_started prepared finished rank_ended consumer_lost
// mirrors src/protocol/trainer_machine.cc: Finish FailConsumer StartUpdate Update
// mirrors src/protocol/commit_machine.cc: update_done finish sender_lost asked answered unreachable decide
// mirrors src/protocol/commit_machine.cc: heeds_failure
// mirrors src/protocol/commit_machine.cc: next_round commit abort end dead alive waiting parked round
// mirrors src/protocol/commit_machine.cc: kNone kUpdating kPrepared kDeciding kCommitted kAborted
// mirrors src/protocol/commit_machine.h: answer_within_ns kUndecided kCommitted kAborted

#ifndef M
#define M 2
#endif
#ifndef CRASHES
#define CRASHES 1  // how many workers may crash
#endif
#ifndef SUSPICIONS
#define SUSPICIONS 1  // how many workers may lose a sender that lives
#endif
#ifndef SILENCES
#define SILENCES 0  // how often a mate that lives may be silent for longer than answer_within_ns
#endif
#ifndef COMMIT_FAILS
#define COMMIT_FAILS 0  // whether what a staged commit does, copies and hooks, may fail
#endif
#ifndef FROM_PREPARED
#define FROM_PREPARED 0  // whether the sync begins where all are prepared and the sender knows it
#endif

// The guards, and the planted bugs that take one away each.
#ifdef BUG_FINISH_WITHOUT_MATE
#define ALL_PREPARED (prepared_count != 0)
#else
#define ALL_PREPARED (none_updating)
#endif
#ifdef BUG_LATE_FINISH
#define OBEYS_FINISH(c) (w[c].stage == prepared || w[c].stage == deciding || w[c].stage == aborted)
#else
#define OBEYS_FINISH(c) (w[c].stage == prepared)
#endif
#ifdef BUG_ABORT_WITHOUT_ASKING
#define ASKS_MATES false
#else
#define ASKS_MATES true
#endif
#ifdef BUG_ASKED_IS_NOT_FENCED
#define FENCED_WHEN_ASKED false
#else
#define FENCED_WHEN_ASKED true
#endif
#ifdef BUG_FAIL_WHILE_COMMITTED
#define FAILS(c) (w[c].stage == updating || w[c].stage == prepared || w[c].stage == committed)
#else
#define FAILS(c) (w[c].stage == updating || w[c].stage == prepared)
#endif
#ifdef BUG_ONE_ROUND
#define ROUNDS 1
#else
#define ROUNDS (M - 1)  // as many as there are mates
#endif
#ifdef BUG_FAIL_WHILE_DECIDING
#define heeds_failure true
#else
#define heeds_failure false
#endif

mtype = { idle, starting, updating, finishing, draining };           // Phase
mtype = { started, prepared, finished, over, lost };                 // Progress, with those above
mtype = { deciding, committed, aborted };                            // Stage, with idle (none), updating and prepared
mtype = { undecided };                                               // CommitWord, with committed and aborted
mtype = { start_update, update, finish, fail_consumer };             // sender -> worker
mtype = { update_started, update_done, update_failed, finish_done, finish_failed, consumer_lost };  // worker -> sender

// ---- the sender --------------------------------------------------------------------------------------------------

mtype phase = idle;
mtype progress[M];
bool sender_dead, sender_done, rank_ended, error;
byte due;            // workers that the message at hand has not been sent to, one bit each
mtype due_message;

chan to_worker[M] = [4] of { mtype };
chan to_sender[M] = [5] of { mtype };

// ---- the workers -------------------------------------------------------------------------------------------------

typedef Worker {
  mtype stage = idle;
  bool dead, cut;     // cut: it has lost its sender
  bool asked_update;  // update() was called
  bool was_prepared;
  bool broken;        // its ConsumerMachine has failed the sync: a commit fails
  bool new_version;   // has committed
  byte round;
  byte alive, waiting;  // mates, one bit each
  byte parked[M];       // by mate: the later round that it asks about; 0: none
  byte question[M];     // by mate: the round of the question to it that is under way; 0: none
  mtype answer[M];      // by mate: its answer that is under way; 0: none
  bool ended;
};
Worker w[M];
byte crashes, suspicions, silences;

#define BIT(n) (1 << (n))
#define EVERYBODY (BIT(M) - 1)

// ---- the sender's events -----------------------------------------------------------------------------------------

#define in_sync(c) (progress[c] != lost)

inline count() {
  none_starting = true; none_updating = true; none_finishing = true; drained = true; prepared_count = 0; any = false;
  for (i : 0 .. M - 1) {
    none_starting = none_starting && progress[i] != starting;
    none_updating = none_updating && progress[i] != updating;
    none_finishing = none_finishing && progress[i] != finishing;
    drained = drained && (progress[i] == lost || progress[i] == over || progress[i] == finished);
    any = any || in_sync(i);
    prepared_count = prepared_count + (progress[i] == prepared);
  }
}

inline fail_sync() {
  if
  :: phase == idle || phase == draining  // the first error is kept
  :: else ->
    phase = draining;
    error = true;
    due_message = fail_consumer;
    for (i : 0 .. M - 1) {
      if
      :: in_sync(i) && progress[i] != over -> due = due | BIT(i);
      :: else
      fi
    }
  fi
}

inline advance() {
  count();
  if
  :: phase == starting && none_starting ->
    phase = updating;
    due_message = update;
    for (i : 0 .. M - 1) {
      if
      :: progress[i] == started -> progress[i] = updating; due = due | BIT(i);
      :: else
      fi
    }
  :: phase == updating && ALL_PREPARED && rank_ended ->
    phase = finishing;
    due_message = finish;
    for (i : 0 .. M - 1) {
      if
      :: progress[i] == prepared -> progress[i] = finishing; due = due | BIT(i);
      :: else
      fi
    }
  :: (phase == finishing && none_finishing) || (phase == draining && drained) -> phase = idle; sender_done = true;
  :: else
  fi;
  none_starting = false; none_updating = false; none_finishing = false; drained = false; any = false;
}

inline hear(c, what) {
  if
  :: phase == idle  // not running
  :: phase != idle && what == update_started && progress[c] == starting -> progress[c] = started;
  :: phase != idle && what == update_done && progress[c] == updating -> progress[c] = prepared;
  :: phase != idle && what == update_failed && in_sync(c) && progress[c] != over && progress[c] != finished ->
    progress[c] = over;
    fail_sync();
  :: phase != idle && what == finish_done && progress[c] == finishing -> progress[c] = finished;
  :: phase != idle && what == finish_failed && progress[c] == finishing -> progress[c] = over; fail_sync();
  :: phase != idle && what == consumer_lost && progress[c] != lost ->
    progress[c] = lost;
    if
    :: phase != draining ->  // drop_replica: the only one, so the sync fails
      for (i : 0 .. M - 1) {
        if
        :: in_sync(i) -> progress[i] = lost; due = due | BIT(i);
        :: else
        fi
      }
      due_message = fail_consumer;
      phase = draining;
      error = true;
    :: else
    fi
  :: else
  fi;
  advance();
}

// No commit is decided unless every worker that is in the sync is prepared.
inline check_finish() {
  assert((w[0].dead || w[0].was_prepared) && (w[1].dead || w[1].was_prepared) &&
         (M < 3 || w[M - 1].dead || w[M - 1].was_prepared));
}

#define IDLE (due == 0 && !sender_done)
#define HEARS(c) (IDLE && nempty(to_sender[c]))

proctype Sender() {
  byte i, prepared_count;
  mtype what;
  bool none_starting, none_updating, none_finishing, drained, any;
  d_step {
    phase = (FROM_PREPARED -> updating : starting);
    due_message = start_update;
    due = (FROM_PREPARED -> 0 : EVERYBODY);
    for (i : 0 .. M - 1) {
      progress[i] = (FROM_PREPARED -> prepared : starting);
    }
    i = 0;
  }
  do
  :: due != 0 && !sender_dead ->  // performs its actions, one message after the other
    atomic {
      if
      :: due & 1 -> i = 0
      :: !(due & 1) && (due & 2) -> i = 1
      :: !(due & 3) && M > 2 -> i = M - 1
      fi;
      d_step {
        due = due & ~BIT(i);
        if
        :: due_message == finish -> check_finish();
        :: else
        fi;
        if
        :: !w[i].dead -> to_worker[i] ! due_message;
        :: else
        fi;
        i = 0;
      }
    }
  :: atomic { HEARS(0) -> d_step { to_sender[0] ? what; hear(0, what); what = 0; i = 0; prepared_count = 0; } }
  :: atomic { HEARS(1) -> d_step { to_sender[1] ? what; hear(1, what); what = 0; i = 0; prepared_count = 0; } }
  :: atomic {
       M > 2 && HEARS(M - 1) ->
       d_step { to_sender[M - 1] ? what; hear(M - 1, what); what = 0; i = 0; prepared_count = 0; }
     }
  :: atomic {
       IDLE && !rank_ended && phase == updating -> d_step { rank_ended = true; advance(); i = 0; prepared_count = 0; }
     }
  // A rank failed or was lost, or a wait took too long.
  :: atomic { IDLE && phase != draining -> d_step { fail_sync(); advance(); i = 0; prepared_count = 0; } }
  :: atomic { IDLE && phase == draining -> phase = idle; sender_done = true }  // drain_timeout_ns
  :: due == 0 && sender_done -> break
  :: atomic {  // it crashes: what it knew does not matter any more
       !sender_dead && !sender_done ->
       d_step {
         sender_dead = true; sender_done = true;
         due = 0; due_message = 0; phase = idle; rank_ended = false; error = false;
         for (i : 0 .. M - 1) {
           progress[i] = 0;
           do
           :: len(to_sender[i]) > 0 -> to_sender[i] ? what
           :: len(to_sender[i]) == 0 -> break
           od
         }
         i = 0; what = 0;
         none_starting = false; none_updating = false; none_finishing = false; drained = false; any = false;
       };
       break
     }
  od
}

// ---- worker events -----------------------------------------------------------------------------------------------

inline tell(c, what) {
  if
  :: !w[c].cut && !sender_dead -> to_sender[c] ! what;
  :: else
  fi
}

// Answers all that is parked with `word`, as far as `upto` rounds.
inline answer_parked(c, word, upto) {
  for (k : 0 .. M - 1) {
    if
    :: w[c].parked[k] != 0 && w[c].parked[k] <= upto ->
      w[c].parked[k] = 0;
      if
      :: !w[k].dead -> w[k].answer[c] = word;
      :: else
      fi
    :: else
    fi
  }
}

inline forget_questions(c) {
  w[c].waiting = 0; w[c].alive = 0; w[c].round = 0;
  for (k : 0 .. M - 1) { w[c].answer[k] = 0; }
}

inline commit(c) {
  w[c].stage = committed;
  answer_parked(c, committed, ROUNDS);
  forget_questions(c);
  if
  :: !w[c].broken -> w[c].new_version = true; tell(c, finish_done);
  :: else -> tell(c, finish_failed);
  fi
}

inline abort(c) {
  w[c].stage = aborted;
  answer_parked(c, aborted, ROUNDS);
  forget_questions(c);
  tell(c, update_failed);
}

inline next_round(c) {
  if
  :: w[c].alive == 0 || w[c].round == ROUNDS -> abort(c);
  :: else ->
    w[c].round++;
    w[c].waiting = w[c].alive;
    for (k : 0 .. M - 1) {
      w[c].question[k] = (w[c].alive & BIT(k) -> w[c].round : 0);
    }
    answer_parked(c, undecided, w[c].round);
  fi
}

inline decide(c) {
  w[c].stage = deciding;
  w[c].round = 0;
  w[c].alive = EVERYBODY & ~BIT(c);
  next_round(c);
}

inline sender_lost(c) {
  w[c].cut = true;
  if
  :: w[c].stage == updating || w[c].stage == idle -> abort(c);
  :: w[c].stage == prepared && ASKS_MATES -> decide(c);
  :: w[c].stage == prepared && !ASKS_MATES -> abort(c);
  :: else
  fi
}

// Mate m's question arrives at c.
inline asked(c, m) {
  n = w[m].question[c];
  w[m].question[c] = 0;
  if
  :: w[c].stage == updating || w[c].stage == idle -> abort(c);
  :: w[c].stage == prepared && FENCED_WHEN_ASKED -> decide(c);
  :: else
  fi;
  if
  :: w[c].stage == deciding && n > w[c].round -> w[c].parked[m] = n;
  :: w[c].stage == deciding && n <= w[c].round -> w[m].answer[c] = undecided;
  :: w[c].stage == prepared -> w[m].answer[c] = undecided;  // only with BUG_ASKED_IS_NOT_FENCED
  :: w[c].stage == committed -> w[m].answer[c] = committed;
  :: else -> w[m].answer[c] = aborted;
  fi
}

inline answered(c, m) {
  if
  :: w[c].stage == deciding && w[c].answer[m] == committed -> commit(c);
  :: w[c].stage == deciding && w[c].answer[m] == aborted -> abort(c);
  :: w[c].stage == deciding && w[c].answer[m] == undecided ->
    w[c].answer[m] = 0;
    w[c].waiting = w[c].waiting & ~BIT(m);
    if
    :: w[c].waiting == 0 -> next_round(c);
    :: else
    fi
  :: else -> w[c].answer[m] = 0;
  fi
}

inline unreachable(c, m) {
  w[c].alive = w[c].alive & ~BIT(m);
  w[c].waiting = w[c].waiting & ~BIT(m);
  w[c].question[m] = 0;
  w[c].answer[m] = 0;
  w[c].parked[m] = 0;
  if
  :: w[c].stage == deciding && w[c].waiting == 0 -> next_round(c);
  :: else
  fi
}

#define ASKED(c, m) (c != m && w[m].question[c] != 0 && !w[m].dead)
#define ANSWERED(c, m) (w[c].answer[m] != 0)
#define UNREACHABLE(c, m) \
  (w[c].stage == deciding && (w[c].alive & BIT(m)) && \
   (w[m].dead || ((w[c].waiting & BIT(m)) && silences < SILENCES)))
#define DECIDED(m) (w[m].dead || w[m].stage == committed || w[m].stage == aborted)
#define OTHERS_OVER(c) (DECIDED(0) && DECIDED(1) && (M < 3 || DECIDED(M - 1)))
#define TIDY k = 0; m = 0; n = 0; what = 0

proctype Consumer(byte c) {
  byte k, m, n;
  mtype what;
  do
  // What the sender sent, in order; also after its loss, if it was under way then.
  :: atomic {
       to_worker[c] ? what ->
       d_step {
         if
         :: what == start_update && w[c].stage == idle && !w[c].cut -> w[c].stage = updating; tell(c, update_started);
         :: what == update && w[c].stage == updating -> w[c].asked_update = true;
         :: what == finish ->
           if
           :: OBEYS_FINISH(c) -> commit(c);
           :: w[c].stage != committed && !OBEYS_FINISH(c) -> tell(c, finish_failed);
           :: else
           fi
         :: what == fail_consumer && FAILS(c) -> w[c].broken = true; w[c].new_version = false; abort(c);
         :: what == fail_consumer && w[c].stage == deciding && heeds_failure -> w[c].broken = true;
         :: else
         fi;
         TIDY;
       }
     }
  :: atomic { w[c].stage == updating && w[c].asked_update ->  // update_done
       w[c].stage = prepared; w[c].was_prepared = true; tell(c, update_done) }
  :: atomic { w[c].stage == updating -> d_step { w[c].broken = true; abort(c); TIDY } }  // an error of its own
  :: atomic { COMMIT_FAILS && w[c].stage == prepared && !w[c].broken -> w[c].broken = true }  // once it commits
  // It loses its sender: because that died, or because it was silent for too long.
  :: atomic {
       !w[c].cut && (sender_dead || suspicions < SUSPICIONS) ->
       d_step {
         if
         :: !sender_dead -> suspicions++; to_sender[c] ! consumer_lost;
         :: else
         fi;
         sender_lost(c);
         TIDY;
       }
     }
  :: atomic {
       if
       :: ASKED(c, 0) -> m = 0
       :: ASKED(c, 1) -> m = 1
       :: M > 2 && ASKED(c, M - 1) -> m = M - 1
       fi;
       d_step { asked(c, m); TIDY }
     }
  :: atomic {
       if
       :: ANSWERED(c, 0) -> m = 0
       :: ANSWERED(c, 1) -> m = 1
       :: M > 2 && ANSWERED(c, M - 1) -> m = M - 1
       fi;
       d_step { answered(c, m); TIDY }
     }
  :: atomic {
       if
       :: UNREACHABLE(c, 0) -> m = 0
       :: UNREACHABLE(c, 1) -> m = 1
       :: M > 2 && UNREACHABLE(c, M - 1) -> m = M - 1
       fi;
       d_step {
         if
         :: !w[m].dead -> silences++;
         :: else
         fi;
         unreachable(c, m);
         TIDY;
       }
     }
  // It crashes.
  :: atomic {
       crashes < CRASHES ->
       d_step {
         crashes++;
         w[c].dead = true;
         w[c].stage = idle;
         w[c].asked_update = false; w[c].was_prepared = false; w[c].broken = false; w[c].new_version = false;
         do
         :: len(to_worker[c]) > 0 -> to_worker[c] ? what
         :: len(to_worker[c]) == 0 -> break
         od;
         for (k : 0 .. M - 1) { w[c].question[k] = 0; w[c].parked[k] = 0; }
         forget_questions(c);
         if
         :: !w[c].cut && !sender_dead -> to_sender[c] ! consumer_lost;
         :: else
         fi;
         TIDY;
       };
       break
     }
  // Nothing more can come.
  :: atomic {
       (w[c].stage == committed || w[c].stage == aborted) && sender_done && empty(to_worker[c]) &&
       !ASKED(c, 0) && !ASKED(c, 1) && (M < 3 || !ASKED(c, M - 1)) && OTHERS_OVER(c) ->
       break
     }
  od;
  atomic {
    w[c].ended = true;
    m = 0;
    do
    :: m < M ->
      // Living mates never end with different versions.
      assert(w[c].dead || !w[m].ended || w[m].dead || w[m].new_version == w[c].new_version);
      m++
    :: else -> break
    od
  }
}

init {
  byte i;
  atomic {
    for (i : 0 .. M - 1) {
      w[i].stage = (FROM_PREPARED -> prepared : idle);
      w[i].asked_update = FROM_PREPARED;
      w[i].was_prepared = FROM_PREPARED;
      run Consumer(i);
    }
    run Sender();
  }
}
