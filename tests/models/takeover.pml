// Takeover: what a producer that is away no longer serves is pulled from another one, in a recovery lane.
//
// C consumers, sharers of every regular lane, run one plan of CHUNKS chunks, K deep. Chunk q is planned at producer
// q mod PLANNED; every producer is a candidate for it. Producers other than the last may die, and may become
// unreachable for one consumer while they live; the last one serves to the end.
//
// What each name stands for is in README.md. The lines that begin with "mirrors" are checked against the sources.
//
// mirrors src/protocol/consumer_machine.cc: issue reroute send_recovery take_over_from resolve_stranded next_seq
// mirrors src/protocol/consumer_machine.cc: leave_lanes reads_from
// mirrors src/protocol/producer_machine.cc: left
// mirrors src/protocol/consumer_machine.cc: away kWaiting kAsked kTransferring kStranded kLanded transfer_done
// mirrors src/protocol/producer_machine.cc: try_pack pack_done arrived packs serves readers
// mirrors src/protocol/consumer_machine.h: producer_lost producer_unreachable
// mirrors src/plan/plan.h: lane_slots

#ifndef C
#define C 1
#endif
#ifndef P
#define P 3
#endif
#ifndef K
#define K 2
#endif
#ifndef PLANNED
#define PLANNED (P - 1)
#endif
#ifndef CHUNKS
#define CHUNKS 4
#endif
#ifndef UNREACHABLE
#define UNREACHABLE 0  // how often a consumer may lose its connection to a producer that lives
#endif

// The guards, and the planted bugs that take one away each.
#ifdef BUG_RECOVERY_RING_OF_K
#define lane_slots K
#else
#define lane_slots (2 * K)
#endif
#ifdef BUG_REROUTE_IN_REGULAR_LANE
#define LANE_OF_ITS_OWN 0
#else
#define LANE_OF_ITS_OWN 1
#endif
#ifdef BUG_STRANDED_FOR_GOOD
#define RESOLVES_STRANDED false
#else
#define RESOLVES_STRANDED true
#endif
#ifdef BUG_FORGETS_WHAT_IT_ASKED
#define TAKES_OVER_ASKED false
#else
#define TAKES_OVER_ASKED true
#endif
#ifdef BUG_NOBODY_LEAVES
#define LEAVES false
#else
#define LEAVES true
#endif

#define BIT(n) (1 << (n))
#define PLACE(c, q) ((c) * CHUNKS + (q))
// Rings: the regular one of each producer, then the recovery rings by producer and consumer.
#define REGULAR(p) (p)
#define RECOVERY(p, c) (LANE_OF_ITS_OWN -> P + (p) * C + (c) : REGULAR(p))
#define RINGS (P + P * C)
#define DEPTH(ring) ((ring) < P -> K : lane_slots)
#define SLOTS (2 * K)
#define SLOT(ring, seq) ((ring) * SLOTS + (seq) % DEPTH(ring))

mtype = { waiting, asked, transferring, stranded, landed };  // RunState

// ---- the consumers -----------------------------------------------------------------------------------------------

typedef Run { mtype state = waiting; byte producer, ring, seq };
Run run_of[C * CHUNKS];  // by PLACE
byte next[C];            // the next chunk to issue
byte away[C];            // producers, one bit each
byte left[C];            // those that know it, and do not wait for its pulls any more
byte next_seq[RINGS];    // of recovery rings
byte lost_connections;

// ---- the producers -----------------------------------------------------------------------------------------------

byte dead;                    // one bit each
byte packs[RINGS];            // slots that a pack writes, one bit each
byte packed[RINGS * SLOTS];   // the chunk that a slot holds, or that is written to it
byte readers[RINGS * SLOTS];  // transfers that read the slot, one bit per consumer
byte serves[RINGS];           // seqs that were served, one bit each
#define PRODUCER_OF(r) ((r) < P -> (r) : ((r) - P) / C)

#define ASKS(c, q, r) (run_of[PLACE(c, q)].state == asked && run_of[PLACE(c, q)].ring == (r))
// All live sharers have arrived, or have left the lane; a recovery ring has one.
#define HERE(c, q, r) (ASKS(c, q, r) || (left[c] & BIT(r)))
#define arrived(q, r) ((r) >= P || (HERE(0, q, r) && HERE(C - 1, q, r)))

// The pull's own pack is under way.
#define PACKING(c, q) \
  ((packs[run_of[PLACE(c, q)].ring] & BIT(run_of[PLACE(c, q)].seq % DEPTH(run_of[PLACE(c, q)].ring))) && \
   packed[SLOT(run_of[PLACE(c, q)].ring, run_of[PLACE(c, q)].seq)] == (q))

// ---- events ------------------------------------------------------------------------------------------------------

// To the next candidate after the one that the run is asked at, of those not away. The last producer never is.
inline reroute(c, q) {
  n = run_of[PLACE(c, q)].producer;
  n = (n + 1) % P;
  do
  :: away[c] & BIT(n) -> n = (n + 1) % P
  :: else -> break
  od;
  run_of[PLACE(c, q)].producer = n;
  run_of[PLACE(c, q)].state = asked;
  run_of[PLACE(c, q)].ring = RECOVERY(n, c);
  run_of[PLACE(c, q)].seq = next_seq[RECOVERY(n, c)];  // send_recovery
  next_seq[RECOVERY(n, c)]++;
  n = 0;
}

inline issue(c, q) {
  next[c]++;
  run_of[PLACE(c, q)].state = asked;
  run_of[PLACE(c, q)].producer = q % PLANNED;
  run_of[PLACE(c, q)].ring = REGULAR(q % PLANNED);
  run_of[PLACE(c, q)].seq = q / PLANNED;
  if
  :: away[c] & BIT(q % PLANNED) -> reroute(c, q);
  :: else
  fi
}

// The consumer has just heard that the producer is away.
inline take_over_from(c, p) {
  away[c] = away[c] | BIT(p);
  for (k : 0 .. CHUNKS - 1) {
    if
    :: run_of[PLACE(c, k)].producer == p && run_of[PLACE(c, k)].state == asked && TAKES_OVER_ASKED -> reroute(c, k);
    :: run_of[PLACE(c, k)].producer == p && run_of[PLACE(c, k)].state == stranded && RESOLVES_STRANDED ->
      reroute(c, k);
    :: else
    fi
  }
}

inline try_pack(c, q) {
  r = run_of[PLACE(c, q)].ring;
  n = run_of[PLACE(c, q)].seq;
  assert(n < DEPTH(r) || (serves[r] & BIT(n - DEPTH(r))));  // never too early
  s = SLOT(r, n);
  assert(!(packs[r] & BIT(n % DEPTH(r))) && readers[s] == 0);  // a serve slot written while in use
  packs[r] = packs[r] | BIT(n % DEPTH(r));
  packed[s] = q;
}

inline pack_done(r, slot) {
  s = r * SLOTS + slot;
  packs[r] = packs[r] & ~BIT(slot);
  for (k : 0 .. C - 1) {
    if
    :: ASKS(k, packed[s], r) ->
      serves[r] = serves[r] | BIT(run_of[PLACE(k, packed[s])].seq);
      readers[s] = readers[s] | BIT(k);
      run_of[PLACE(k, packed[s])].state = transferring;
    :: else
    fi
  }
}

#define RUN run_of[PLACE(c, q)]

// One chunk of one consumer. The process of the first sharer that asks packs for all.
proctype Chunk(byte c; byte q) {
  byte n, r, s;
  do
  :: atomic {  // drain before issue
       RUN.state == waiting && next[c] == q && (q < K || run_of[PLACE(c, q) - K].state == landed) ->
       d_step { issue(c, q); n = 0 }
     }
  :: atomic {
       RUN.state == asked && !(dead & BIT(RUN.producer)) && arrived(q, RUN.ring) &&
       (c == 0 || RUN.ring >= P || !ASKS(0, q, RUN.ring)) && !PACKING(c, q) ->
       d_step { try_pack(c, q); n = 0; r = 0; s = 0 }
     }
  :: atomic {  // transfer_done: it ends well, also out of a dead process's memory
       RUN.state == transferring ->
       d_step { s = SLOT(RUN.ring, RUN.seq); readers[s] = readers[s] & ~BIT(c); RUN.state = landed; s = 0 };
       break
     }
  :: atomic {  // transfer_done: it fails, as the producer cannot be reached
       RUN.state == transferring && ((dead | away[c]) & BIT(RUN.producer)) ->
       d_step {
         s = SLOT(RUN.ring, RUN.seq);
         readers[s] = readers[s] & ~BIT(c);
         RUN.state = stranded;
         if
         :: away[c] & BIT(RUN.producer) -> reroute(c, q);  // resolve_stranded
         :: else
         fi;
         s = 0;
         n = 0;
       }
     }
  od
}

// A ring's packs end in any order.
proctype Ring(byte r) {
  byte k, n, s;
end:
  do
  :: atomic {
       packs[r] != 0 ->
       n = 0;
       do
       :: packs[r] & BIT(n) -> break
       :: (packs[r] >> (n + 1)) != 0 -> n++
       od;
       d_step { pack_done(r, n); k = 0; n = 0; s = 0 }
     }
  od
}

// reads_from: of the regular ring (K is 1 or 2 here)
#ifdef BUG_LEAVES_WHILE_READING
#define reads_from(c, p) false
#else
#define reads_from(c, p) ((readers[(p) * SLOTS] | readers[(p) * SLOTS + K - 1]) & BIT(c))
#endif
#define MAY_LEAVE(c, p) (LEAVES && (away[c] & BIT(p)) && !((left[c] | dead) & BIT(p)) && !reads_from(c, p))

#define HEARS(c, p) (!(away[c] & BIT(p)) && ((dead & BIT(p)) || lost_connections < UNREACHABLE))

proctype Links(byte c) {
  byte k, n, p;
end:
  do
  :: atomic {  // producer_lost: the control channel tells; or producer_unreachable: its connection broke
       if
       :: HEARS(c, 0) -> p = 0
       :: P > 2 && HEARS(c, P - 2) -> p = P - 2
       fi;
       d_step {
         if
         :: !(dead & BIT(p)) -> lost_connections++;
         :: else
         fi;
         take_over_from(c, p);
         k = 0; n = 0; p = 0;
       }
     }
  :: atomic {  // leave_lanes
       if
       :: MAY_LEAVE(c, 0) -> p = 0
       :: P > 2 && MAY_LEAVE(c, P - 2) -> p = P - 2
       fi;
       left[c] = left[c] | BIT(p);
       p = 0;
     }
  od
}

// Any producer but the last dies at any time, or not at all.
proctype Deaths() {
  byte p, r;
  do
  :: atomic {
       if
       :: !(dead & 1) -> p = 0
       :: P > 2 && !(dead & BIT(P - 2)) -> p = P - 2
       fi;
       d_step {
         dead = dead | BIT(p);
         for (r : 0 .. RINGS - 1) {
           if
           :: PRODUCER_OF(r) == p -> packs[r] = 0;
           :: else
           fi
         }
         p = 0; r = 0;
       }
     }
  :: break  // nobody else dies
  od
}

init {
  byte c, q;
  atomic {
    for (c : 0 .. C - 1) {
      for (q : 0 .. CHUNKS - 1) { run Chunk(c, q); }
      run Links(c);
    }
    for (q : 0 .. RINGS - 1) { run Ring(q); }
    run Deaths();
  }
}
