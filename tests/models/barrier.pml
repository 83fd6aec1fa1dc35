// The free barrier: live sets, early, late and repeated signals, losses and restarts.
//
// Two ranks own one gather group; three workers, each a replica of its own, take it: worker 0 takes nothing of it and
// signals as its update starts, worker 1 takes its bytes from rank 0, worker 2 from rank 1; all signal to both. SYNCS
// syncs, of which all but the last may fail. A worker may be lost at any time and, if it is worker RESTARTS, come back
// as another life. Signals may be late, overtake one another and arrive again and again; what the hub sends a rank
// arrives in order.
//
// What each name stands for is in README.md. The lines that begin with "mirrors" are checked against the sources.
//
// mirrors src/protocol/producer_machine.cc: begin_sync publish_group signal apply_signals maybe_free leave_sync
// mirrors src/protocol/producer_machine.cc: fail_sync consumer_lost new_life forget_life early gone live
// mirrors src/protocol/producer_machine.cc: incarnation published freed signalled missing running early_failure_id
// mirrors src/protocol/producer_machine.cc: stale_sync stale_incarnation duplicate_signals not_live
// mirrors src/protocol/consumer_machine.cc: start_update update pre_free end_reading end_failed
// mirrors src/protocol/trainer_machine.cc: drained drain_timeout_ns

#ifndef SYNCS
#define SYNCS 2
#endif
#ifndef LOSSES
#define LOSSES 1  // how many workers may be lost in all
#endif
#ifndef RESTARTS
#define RESTARTS 2  // which worker may come back; NOBODY: none
#endif
#define NOBODY 9
#ifndef AGAIN
#define AGAIN 1  // whether signals that have arrived may arrive again
#endif
#ifndef UP_ANY_TIME
#define UP_ANY_TIME 0  // whether a worker may come back while a sync is open that has not begun on every rank
#endif
#ifndef LAG
#define LAG 1  // whether a rank may be behind by a sync
#endif
#define C 3
#define R 2
#define ALL 7

// The guards, and the planted bugs that take one away each.
#ifdef BUG_COUNT_SIGNALS
#define KNOWN(r, c) false  // a counter instead of a set
#else
#define KNOWN(r, c) (p[r].signalled & BIT(c))
#endif
#ifdef BUG_STALE_SYNC
#define STALE(r, s) false
#else
#define STALE(r, s) ((s) < p[r].sync_id)
#endif
#ifdef BUG_FREE_ON_FIRST
#define COMPLETE(r) (p[r].missing < live_count(p[r].live))
#else
#define COMPLETE(r) (p[r].missing == 0)
#endif
#ifdef BUG_BEGIN_ERASES_EARLY
#define TAKE_EARLY(r, c) false
#else
#define TAKE_EARLY(r, c) (p[r].early[c] == p[r].sync_id)
#endif
#define OF_ANOTHER_LIFE(r, c, its_life) (p[r].incarnation[c] != (its_life))
#ifdef BUG_LOSS_KEEPS_BARRIER
#define NARROWS false
#else
#define NARROWS true
#endif
#ifdef BUG_LOSS_BEFORE_BEGIN
#define REMEMBERS_GONE false
#else
#define REMEMBERS_GONE true
#endif
#ifdef BUG_SIGNAL_WHILE_READING
#define SIGNALS_AT_READY true
#else
#define SIGNALS_AT_READY false
#endif

#define BIT(n) (1 << (n))
#define live_count(mask) (((mask) & 1) + (((mask) >> 1) & 1) + (((mask) >> 2) & 1))
#define NEEDS(c) (c)  // the ranks, one bit each, that worker c takes bytes from

// ---- the sender --------------------------------------------------------------------------------------------------

byte open_sync;
byte open_life[C];  // the life that is in the sync; 0: not in it, or lost since
bool sync_failed, over;
byte lost;          // workers lost so far

// hub -> rank, in order
#define OPEN 0
#define FAILED 16
#define LOST 32
#define UP 48
#define WHAT(m) ((m) & 48)
#define ARG(m) ((m) & 15)
chan hub[R] = [SYNCS * 2 + 3] of { byte };
inline tell_ranks(m) { hub[0] ! m; hub[1] ! m; }

// ---- the ranks' producers ----------------------------------------------------------------------------------------

typedef Rank {
  byte sync_id, opened, opened_live;  // `opened`: what send_weights will begin next
  bool running, published, freed;
  byte live, gone, signalled, missing;
  byte incarnation[C];
  byte early[C];  // the sync whose signals are kept; 0: none
  byte early_failure_id;
};
Rank p[R];

// ---- the workers -------------------------------------------------------------------------------------------------

typedef Worker {
  byte life = 1;  // 0: dead
  byte sync_id;
  byte to_read, reading;  // ranks, one bit each
  bool error;
};
Worker w[C];

// Signals under way or arrived: one bit for each worker, life and sync.
#define MESSAGE(c, life, s) BIT((c) * 4 + ((life) - 1) * 2 + (s) - 1)
short sent[R], got[R];
// Of an earlier sync all messages count as sent, and as arrived once: they may still arrive at any time, now also those
// that were never sent, and nobody waits for them. (More behaviours in fewer states.)
#define OLD_MESSAGES(s) ((s) == 2 -> 1365 : 0)  // bit 0 of each pair
inline send_signal(c, r) {
  if
  :: w[c].sync_id == open_sync -> sent[r] = sent[r] | MESSAGE(c, w[c].life, w[c].sync_id);
  :: else
  fi
}
// A life's signals reach a rank after the hub's word that it is up: through the hub too, or on an endpoint that it
// has reserved by.
#define HEARD_OF(r) (p[r].incarnation[RESTARTED] < 2 -> ~(MESSAGE(RESTARTED, 2, 1) | MESSAGE(RESTARTED, 2, 2)) : ~0)
#define RESTARTED (RESTARTS == NOBODY -> 0 : RESTARTS)
inline signal_all(c) { send_signal(c, 0); send_signal(c, 1) }

// ---- producer events ---------------------------------------------------------------------------------------------

// Worker c is in the rank's sync with the life that the sync was opened for, and has not failed it by itself.
#define TAKES_PART(r, c) (w[c].life != 0 && open_sync == p[r].sync_id && w[c].life == open_life[c])

inline maybe_free(r) {
  if
  :: p[r].running && p[r].published && COMPLETE(r) ->
    for (i : 0 .. C - 1) {
      // Freed while a live worker reads it, or will read it.
      assert(!(p[r].live & BIT(i)) || !TAKES_PART(r, i) ||
             (w[i].sync_id == p[r].sync_id && !(w[i].reading & BIT(r)) && (w[i].error || !(w[i].to_read & BIT(r)))));
    }
    assert(!p[r].freed);
    p[r].freed = true;
    end(r);  // the only group: SyncEnded
  :: else
  fi
}

// No signal has an effect any more: forget them, so that equal states are equal.
inline end(r) {
  p[r].running = false;
  p[r].published = false;
  p[r].signalled = 0;
  p[r].missing = 0;
  p[r].live = 0;
}
inline fail_sync(r) { end(r) }

inline leave_sync(r, c) {
  if
  :: p[r].running && (p[r].live & BIT(c)) && NARROWS ->
    p[r].live = p[r].live & ~BIT(c);
    if
    :: !(p[r].signalled & BIT(c)) -> p[r].missing--;
    :: else
    fi;
    if
    :: p[r].live == 0 -> fail_sync(r);
    :: else -> maybe_free(r);
    fi
  :: else
  fi
}

inline forget_life(r, c) {
  leave_sync(r, c);
  p[r].early[c] = 0;
}

inline new_life(r, c, its_life) {
  if
  :: p[r].incarnation[c] == its_life
  :: p[r].incarnation[c] != its_life ->
    if
    :: p[r].incarnation[c] != 0 -> forget_life(r, c);
    :: else
    fi;
    p[r].incarnation[c] = its_life;
    p[r].gone = p[r].gone & ~BIT(c);
  fi
}

inline consumer_lost(r, c) {
  p[r].gone = p[r].gone | BIT(c);
  forget_life(r, c);
}

inline apply_signals(r, c) {
  if
  :: KNOWN(r, c) || !p[r].running  // duplicate_signals; or failed: it only says that it stopped reading
  :: else ->
    p[r].signalled = p[r].signalled | BIT(c);
    if
    :: p[r].missing != 0 -> p[r].missing--;
    :: else
    fi;
    maybe_free(r);
  fi
}

inline signal(r, c, its_life, s) {
  if
  :: p[r].incarnation[c] == 0 -> p[r].incarnation[c] = its_life;
  :: else
  fi;
  if
  :: OF_ANOTHER_LIFE(r, c, its_life)                               // stale_incarnation
  :: !OF_ANOTHER_LIFE(r, c, its_life) && STALE(r, s)               // stale_sync
  :: !OF_ANOTHER_LIFE(r, c, its_life) && s > p[r].sync_id ->
    p[r].early[c] = (s > p[r].early[c] -> s : p[r].early[c]);      // kept_early
  :: !OF_ANOTHER_LIFE(r, c, its_life) && !STALE(r, s) && s <= p[r].sync_id ->
    if
    :: p[r].live & BIT(c) -> apply_signals(r, c);
    :: else  // not_live
    fi
  fi
}

inline begin_sync(r) {
  p[r].sync_id = p[r].opened;
  p[r].running = true;
  p[r].published = false;
  p[r].freed = false;
  p[r].signalled = 0;
  p[r].live = p[r].opened_live;
  p[r].missing = live_count(p[r].live);
  if
  :: p[r].early_failure_id == p[r].sync_id -> fail_sync(r);
  :: else
  fi;
  for (k : 0 .. C - 1) {
    if
    :: (p[r].gone & BIT(k)) && REMEMBERS_GONE -> leave_sync(r, k);
    :: else
    fi
  }
  for (k : 0 .. C - 1) {
    if
    :: TAKE_EARLY(r, k) && (p[r].live & BIT(k)) -> apply_signals(r, k);
    :: else
    fi;
    if
    :: p[r].early[k] <= p[r].sync_id -> p[r].early[k] = 0;
    :: else
    fi
  }
}

inline publish_group(r) {
  p[r].published = true;
  maybe_free(r);
}

#define FRESH(r) (sent[r] & ~got[r] & HEARD_OF(r))

proctype Producer(byte r) {
  byte i, k, m;
  short n;
  do
  :: atomic {
       hub[r] ? m ->
       d_step {
         if
         :: WHAT(m) == OPEN -> p[r].opened++; p[r].opened_live = ARG(m);
         :: WHAT(m) == FAILED ->
           if
           :: ARG(m) == p[r].sync_id && p[r].running -> fail_sync(r);
           :: ARG(m) > p[r].sync_id -> p[r].early_failure_id = ARG(m);
           :: else
           fi
         :: WHAT(m) == LOST -> m = ARG(m); consumer_lost(r, m);
         :: WHAT(m) == UP -> m = ARG(m); new_life(r, m, 2);
         fi;
         i = 0; k = 0; m = 0;
       }
     }
  :: atomic { p[r].opened > p[r].sync_id -> d_step { begin_sync(r); i = 0; k = 0 } }
  :: atomic { p[r].running && !p[r].published -> d_step { publish_group(r); i = 0 } }
  :: atomic {  // a signal arrives for the first time
       FRESH(r) != 0 ->
       k = 0;
       do
       :: FRESH(r) & BIT(k) -> break
       :: (FRESH(r) >> (k + 1)) != 0 -> k++
       od;
       d_step {
         n = BIT(k);
         got[r] = got[r] | n;
         m = k / 4;
         k = k % 4;
         signal(r, m, k / 2 + 1, k % 2 + 1);
         i = 0; k = 0; m = 0; n = 0;
       }
     }
  od
}

// Whatever has arrived may arrive again.
active proctype Network() {
  byte i, k, m, r;
  do
  :: atomic {
       if
       :: AGAIN && (got[0] & HEARD_OF(0)) != 0 -> r = 0
       :: AGAIN && (got[1] & HEARD_OF(1)) != 0 -> r = 1
       fi;
       k = 0;
       do
       :: got[r] & HEARD_OF(r) & BIT(k) -> break
       :: ((got[r] & HEARD_OF(r)) >> (k + 1)) != 0 -> k++
       od;
       d_step {
         m = k / 4;
         k = k % 4;
         signal(r, m, k / 2 + 1, k % 2 + 1);
         i = 0; k = 0; m = 0; r = 0;
       }
     }
  od
}

// ---- consumer events ---------------------------------------------------------------------------------------------

// All of it read: its group is signalled to all its owners.
inline end_reading(c) {
  if
  :: w[c].to_read == 0 && !w[c].error -> signal_all(c);
  :: else
  fi
}

// Whether the next sync may open although rank r has not ended this one, after drain_timeout_ns: rank 0, with LAG.
#define DRAINED(r) ((LAG && r == 0) || (p[r].sync_id == open_sync && !p[r].running))

#define SERVES(r, c) (p[r].sync_id == w[c].sync_id && p[r].running && p[r].published && (p[r].live & BIT(c)))

proctype Consumer(byte c) {
  byte r;
  do
  :: atomic {  // start_update and update; of a sync that it is in
       w[c].life != 0 && open_life[c] == w[c].life && w[c].sync_id < open_sync && w[c].reading == 0 &&
       (w[c].to_read == 0 || w[c].error) ->
       d_step {
         w[c].sync_id = open_sync;
         w[c].error = false;
         w[c].to_read = NEEDS(c);
         end_reading(c);  // pre_free
       }
     }
  :: atomic {  // its pull is answered: it reads
       if
       :: (w[c].to_read & ~w[c].reading & 1) && !w[c].error && SERVES(0, c) -> r = 0
       :: (w[c].to_read & ~w[c].reading & 2) && !w[c].error && SERVES(1, c) -> r = 1
       fi;
       d_step {
         assert(!p[r].freed || !TAKES_PART(r, c));  // a pull of a freed group
         w[c].reading = w[c].reading | BIT(r);
         if
         :: SIGNALS_AT_READY -> signal_all(c);
         :: else
         fi;
         r = 0;
       }
     }
  :: atomic {  // transfer_done or scatter_done
       if
       :: w[c].reading & 1 -> r = 0
       :: w[c].reading & 2 -> r = 1
       fi;
       d_step {
         w[c].reading = w[c].reading & ~BIT(r);
         w[c].to_read = w[c].to_read & ~BIT(r);
         end_reading(c);
         r = 0;
       }
     }
  :: atomic {  // the sync failed elsewhere, or is over for everybody: nothing new is started
       w[c].life != 0 && w[c].to_read != 0 && !w[c].error && (sync_failed || w[c].sync_id < open_sync) ->
       w[c].error = true
     }
  :: atomic {  // end_failed: what it had asked for is given up
       w[c].life != 0 && w[c].error && w[c].to_read != 0 && w[c].reading == 0 ->
       d_step {
         if
         :: w[c].to_read & 1 -> send_signal(c, 0);
         :: else
         fi;
         if
         :: w[c].to_read & 2 -> send_signal(c, 1);
         :: else
         fi;
         w[c].to_read = 0;
       }
     }
  :: atomic {  // killed, and found to be lost
       w[c].life != 0 && lost < LOSSES ->
       d_step {
         lost++;
         w[c].life = 0;
         w[c].sync_id = 0; w[c].to_read = 0; w[c].reading = 0; w[c].error = false;
         open_life[c] = 0;
         tell_ranks(LOST + c);
       }
     }
  :: atomic {  // started again
       c == RESTARTS && w[c].life == 0 &&
       (UP_ANY_TIME || (p[0].sync_id == open_sync && p[1].sync_id == open_sync)) ->
       d_step { w[c].life = 2; tell_ranks(UP + c) }
     }
  od
}

// ---- the sender --------------------------------------------------------------------------------------------------

// A live worker is prepared when its signals are confirmed; a rank has ended when its group is freed.
#define CONFIRMED(c, r) (got[r] & MESSAGE(c, w[c].life, open_sync))
#define PREPARED(c) \
  (open_life[c] == 0 || \
   (w[c].sync_id == open_sync && w[c].to_read == 0 && CONFIRMED(c, 0) && CONFIRMED(c, 1)))
#define RANK_ENDED(r) (p[r].sync_id == open_sync && p[r].freed)

proctype Sender() {
  byte i;
  do
  :: atomic {
       open_sync < SYNCS && (open_sync == 0 || (over && DRAINED(0) && DRAINED(1))) ->
       d_step {
         open_sync++;
         over = false;
         sync_failed = false;
         sent[0] = OLD_MESSAGES(open_sync); sent[1] = sent[0]; got[0] = sent[0]; got[1] = sent[0];
         for (i : 0 .. C - 1) { open_life[i] = w[i].life; }
         tell_ranks(OPEN + (w[0].life != 0) + 2 * (w[1].life != 0) + 4 * (w[2].life != 0));
         i = 0;
       }
     }
  // It fails. Whether the sender waits until all have drained, or gives up on them: the next sync may open.
  :: atomic {
       open_sync != 0 && open_sync < SYNCS && !over ->
       sync_failed = true; over = true; tell_ranks(FAILED + open_sync)
     }
  :: atomic {
       open_sync != 0 && !over && PREPARED(0) && PREPARED(1) && PREPARED(2) && RANK_ENDED(0) &&
       RANK_ENDED(1) ->
       over = true
     }
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. R - 1) {
      p[i].incarnation[0] = 1; p[i].incarnation[1] = 1; p[i].incarnation[2] = 1;
    }
    run Producer(0); run Producer(1);
    run Consumer(0); run Consumer(1); run Consumer(2);
    run Sender();
  }
}

// Unless it fails, the last sync ends: every group is freed on both ranks.
ltl always_ends { <> (open_sync == SYNCS && over) }
