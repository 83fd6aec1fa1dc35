// Slots: who writes and who reads a serve slot and a receive slot, across syncs that fail.
//
// One producer with one ring of K serve slots, two sharers (one per replica) with K receive slots each, CHUNKS chunks
// per sync, SYNCS syncs. A sync may fail at any time; its packs, transfers and scatters end when they like. One
// sharer may leave the sync (its replica lost a worker) and go on without knowing. The ring may be allocated anew.
//
// What each name stands for is in README.md. The lines that begin with "mirrors" are checked against the sources.
//
// mirrors src/protocol/consumer_machine.cc: start_update issue start_transfers end_reading start_scatters settle
// mirrors src/protocol/consumer_machine.cc: end_failed ready transfer_done scatter_done fail slot_cursor queued done
// mirrors src/protocol/consumer_machine.cc: generation user transfers scatters in_flight awaited stale_sync
// mirrors src/protocol/producer_machine.cc: begin_sync admit try_pack try_all_packs pack_done fail_sync leave_sync
// mirrors src/protocol/producer_machine.cc: stop_reading_group stop_reading_earlier_syncs
// mirrors src/protocol/producer_machine.cc: stop_reading_all settle_ring busy readers ticket arrived live_sharers
// mirrors src/protocol/producer_machine.cc: meetings serves ring_allocated early
// mirrors src/protocol/trainer_machine.cc: drained FailConsumer drain_timeout_ns

#ifndef K
#define K 2
#endif
#ifndef CHUNKS
#define CHUNKS 4
#endif
#ifndef SYNCS
#define SYNCS 2
#endif
#define C 2
#ifndef LEAVE
#define LEAVE 0  // whether consumer 1 may leave a sync
#endif
#ifndef REGROW
#define REGROW 0  // whether the ring may be allocated anew; signals and readers matter only then
#endif

// The guards, and the planted bugs that take one away each.
#ifdef BUG_SLOT_BY_ARRIVAL
byte arrivals, slot_at[CHUNKS];
#define SLOT(pull_seq) slot_at[pull_seq]
#define BY_ARRIVAL(pull_seq) slot_at[pull_seq] = arrivals % K; arrivals++
#define ARRIVE_ANEW arrivals = 0
#else
#define BY_ARRIVAL(pull_seq) skip
#define ARRIVE_ANEW skip
#define SLOT(pull_seq) ((pull_seq) % K)
#endif
#ifdef BUG_MEETING_WITHOUT_ALL
#define ALL_ARRIVED(pull_seq) true
#else
#define ALL_ARRIVED(pull_seq) (COUNT(arrived[pull_seq]) == live_sharers)
#endif
#ifdef BUG_PACK_OVER_PACK
#define NO_PACK(slot_index) true
#else
#define NO_PACK(slot_index) (ring[slot_index].ticket == 0)
#endif
#ifdef BUG_REGROW_WHILE_READ
#define busy(slot_index) (ring[slot_index].ticket != 0)
#else
#define busy(slot_index) (ring[slot_index].ticket != 0 || ring[slot_index].readers != 0)
#endif
#ifdef BUG_NO_DRAIN
#define MAY_ISSUE_AFTER(c, q) (w[c].chunks[q].state != asked)
#else
#define MAY_ISSUE_AFTER(c, q) (w[c].chunks[q].state == landed || w[c].chunks[q].state == chunk_done)
#endif
#ifdef BUG_NO_GENERATION
#define USE_BEFORE_ENDED(c, s, q) true
#else
#define USE_BEFORE_ENDED(c, s, q) (w[c].slots[s].done + 1 == w[c].chunks[q].generation)
#endif
#ifdef BUG_FAIL_WITHOUT_DRAIN
#define in_flight(c) (w[c].transfers != 0)
#else
#define in_flight(c) (w[c].transfers + w[c].scatters != 0)
#endif
#ifdef BUG_STALE_READY
#define OF_THIS_SYNC(c, b) true
#else
#define OF_THIS_SYNC(c, b) (SYNC_OF(b) == w[c].sync_id)
#endif

// The bytes of chunk `chunk` (its pull's seq is the same number) in sync `sync`; 0: torn, or nothing.
#define BYTES(sync, chunk) ((sync) * 8 + (chunk) + 1)
#define SYNC_OF(bytes) (((bytes) - 1) / 8)
#define CHUNK_OF(bytes) (((bytes) - 1) % 8)

mtype = { idle, updating, prepared, failed };                         // WorkerState
mtype = { waiting, asked, ready, transferring, landed, chunk_done };  // RunState and ChunkState, one run per chunk

// ---- the sender, as far as slots care ----------------------------------------------------------------------------

byte open_sync;       // the newest sync that it opened
bool sync_failed;     // that sync has failed
bool left[C];         // not counted in the consumer's running sync any more
bool may_leave = LEAVE;

// ---- the producer ------------------------------------------------------------------------------------------------

typedef Slot {
  byte ticket;  // the bytes that a pack is writing; 0: none
  byte bytes;   // what it holds: memory, not state of the machine
  byte sync_id;
  byte seq;
  byte readers;  // one bit per consumer
};
byte p_sync_id;
bool running;
byte live;          // one bit per consumer
byte live_sharers;
byte arrived[CHUNKS];  // meetings: one bit per consumer
byte packing;          // one bit per meeting that has a ticket
byte serves[C];        // one bit per seq that was served
byte early[C];         // pulls of a sync that has not begun here: one bit per seq
byte early_sync[C];
Slot ring[K];
bool may_regrow = REGROW;

// ---- the consumers -----------------------------------------------------------------------------------------------

typedef Progress { mtype state; byte slot; byte generation; byte serve_slot };
typedef Receive {
  byte queued, done, user;  // the machine's
  byte bytes;               // memory
  byte transfer, from;      // a transfer that writes it, and the serve slot that it reads
  byte scatter;             // the bytes that a scatter takes from it
};
typedef Worker {
  mtype state = idle;
  byte sync_id;
  bool error;
  byte next, done_count, slot_cursor;
  byte transfers, scatters;
  Progress chunks[CHUNKS];
  Receive slots[K];
};
Worker w[C];

// In order, per consumer.
// A message is the bytes that it is about, plus SIGNAL where it says that they will not be read any more.
#define SIGNAL 128
chan to_producer[C] = [SYNCS * (K + REGROW * CHUNKS)] of { byte };
chan to_consumer[C] = [SYNCS * K] of { byte, byte };  // Ready: bytes, serve slot

// ---- what must hold ----------------------------------------------------------------------------------------------

inline check_nobody_reads(s) {
  for (i : 0 .. C - 1) {
    for (j : 0 .. K - 1) {
      assert(left[i] || w[i].slots[j].transfer == 0 || w[i].slots[j].from != s);  // a serve slot written while read
    }
  }
}

// ---- producer events ---------------------------------------------------------------------------------------------

#define COUNT(mask) (((mask) & 1) + (((mask) >> 1) & 1))

inline try_pack(pull_seq) {
  if
  :: running && arrived[pull_seq] != 0 && !(packing & (1 << pull_seq)) && ALL_ARRIVED(pull_seq) &&
     NO_PACK(SLOT(pull_seq)) ->
    s = SLOT(pull_seq);
    assert(ring[s].ticket == 0);  // a serve slot written by two packs
    check_nobody_reads(s);
    ring[s].ticket = BYTES(p_sync_id, pull_seq);
    ring[s].bytes = 0;
    ring[s].sync_id = p_sync_id;
    ring[s].seq = pull_seq;
    ring[s].readers = 0;
    packing = packing | (1 << pull_seq);
  :: else
  fi
}

inline try_all_packs() {
  for (q : 0 .. CHUNKS - 1) { try_pack(q); }
}

inline stop_reading_all(c) {
  for (j : 0 .. K - 1) { ring[j].readers = ring[j].readers & ~(1 << c); }
}
inline stop_reading_earlier_syncs(c) {
  for (j : 0 .. K - 1) {
    if
    :: ring[j].sync_id != p_sync_id -> ring[j].readers = ring[j].readers & ~(1 << c);
    :: else
    fi
  }
}
inline stop_reading_group(c, sync, chunk) {  // a group is one chunk here
  for (j : 0 .. K - 1) {
    if
    :: ring[j].sync_id == sync && ring[j].seq == chunk -> ring[j].readers = ring[j].readers & ~(1 << c);
    :: else
    fi
  }
}

inline begin_sync() {
  p_sync_id = open_sync;
  running = !sync_failed;  // a failure that came early takes effect at once
  live = (1 << C) - 1;
  live_sharers = C;
  for (i : 0 .. C - 1) { serves[i] = 0; }
  for (q : 0 .. CHUNKS - 1) { arrived[q] = 0; }
  packing = 0;
  ARRIVE_ANEW;
}

inline fail_sync() {
  running = false;
  for (q : 0 .. CHUNKS - 1) { arrived[q] = 0; }
  packing = 0;
}

inline admit(c, pull_seq) {
  if
  :: !running || !(live & (1 << c))  // refused: the consumer hears of the failure, or that it left, anyway
  :: else ->
    // Refused as too early: a consumer that drains before it issues never is.
    assert(left[c] || pull_seq < K || (serves[c] & (1 << (pull_seq - K))));
    BY_ARRIVAL(pull_seq);
    stop_reading_earlier_syncs(c);
    ring[SLOT(pull_seq)].readers = ring[SLOT(pull_seq)].readers & ~(1 << c);
    arrived[pull_seq] = arrived[pull_seq] | (1 << c);
    try_pack(pull_seq);
  fi
}

inline apply_early() {
  for (m : 0 .. C - 1) {
    if
    :: early_sync[m] == p_sync_id ->
      for (b : 0 .. CHUNKS - 1) {
        if
        :: early[m] & (1 << b) -> admit(m, b);
        :: else
        fi
      }
    :: else
    fi;
    if
    :: early_sync[m] <= p_sync_id -> early[m] = 0; early_sync[m] = 0;
    :: else
    fi
  }
}

inline pack_done(s) {
  b = ring[s].ticket;
  ring[s].ticket = 0;
  ring[s].bytes = b;
  if
  :: !running || SYNC_OF(b) != p_sync_id -> try_all_packs();  // its sync is over
  :: else ->
    q = CHUNK_OF(b);
    ring[s].readers = (REGROW -> arrived[q] : 0);
    for (i : 0 .. C - 1) {
      if
      :: arrived[q] & (1 << i) -> serves[i] = serves[i] | (1 << q); to_consumer[i] ! b, s;
      :: else
      fi
    }
    arrived[q] = 0;
    packing = packing & ~(1 << q);
  fi
}

inline leave_sync(c) {
  live = live & ~(1 << c);
  live_sharers--;
  stop_reading_all(c);
  for (q : 0 .. CHUNKS - 1) {
    arrived[q] = arrived[q] & ~(1 << c);
  }
  try_all_packs();
}

active proctype Producer() {
  byte b, i, j, m, q, s;
  do
  :: atomic {
       p_sync_id < open_sync -> d_step { begin_sync(); apply_early(); b = 0; i = 0; j = 0; m = 0; q = 0; s = 0 }
     }
  :: atomic { running && (sync_failed || p_sync_id < open_sync) -> d_step { fail_sync(); q = 0 } }
  :: atomic {  // a message of consumer 0 or 1
       if
       :: to_producer[0] ? b -> m = 0
       :: to_producer[1] ? b -> m = 1
       fi;
       d_step {
         if
         :: b & SIGNAL ->
           b = b & ~SIGNAL;
           stop_reading_group(m, SYNC_OF(b), CHUNK_OF(b));
           if
           :: SYNC_OF(b) == p_sync_id -> stop_reading_earlier_syncs(m);
           :: else
           fi
         :: !(b & SIGNAL) && SYNC_OF(b) == p_sync_id -> admit(m, CHUNK_OF(b));
         :: !(b & SIGNAL) && SYNC_OF(b) > p_sync_id ->
           early[m] = (early_sync[m] == SYNC_OF(b) -> early[m] : 0) | (1 << CHUNK_OF(b));
           early_sync[m] = SYNC_OF(b);
         :: else  // stale_sync
         fi;
         b = 0; i = 0; j = 0; m = 0; q = 0; s = 0;
       }
     }
  :: atomic {  // one of the packs has ended
       if
       :: ring[0].ticket != 0 -> m = 0
       :: K > 1 && ring[1].ticket != 0 -> m = 1
       :: K > 2 && ring[K - 1].ticket != 0 -> m = K - 1
       fi;
       d_step { pack_done(m); b = 0; i = 0; j = 0; m = 0; q = 0; s = 0 }
     }
  :: atomic {  // a worker of the second replica was lost: its mates leave
       may_leave && running && p_sync_id == open_sync && (live & 2) && w[1].sync_id == p_sync_id &&
       w[1].state == updating ->
       d_step { may_leave = false; left[1] = true; leave_sync(1); b = 0; i = 0; j = 0; q = 0; s = 0 }
     }
  :: atomic {  // somebody reserved larger slots: settle_ring, ring_allocated
       may_regrow && !busy(0) && !busy(K - 1) && (K < 3 || !busy(1)) ->
       d_step {
         may_regrow = false;
         for (s : 0 .. K - 1) {
           check_nobody_reads(s);
           ring[s].bytes = 0;
           ring[s].sync_id = 0;
           ring[s].seq = 0;
         }
         try_all_packs();
         i = 0; j = 0; q = 0; s = 0;
       }
     }
  od
}

// ---- consumer events ---------------------------------------------------------------------------------------------

inline send_signal(c, chunk) {
  if
  :: REGROW -> to_producer[c] ! SIGNAL + BYTES(w[c].sync_id, chunk);
  :: else
  fi
}

inline issue(c) {
  do
  :: w[c].next == CHUNKS -> break
  :: else ->
    q = w[c].next;
    if
    :: q >= K && !MAY_ISSUE_AFTER(c, q - K) -> break
    :: else ->
      w[c].chunks[q].state = asked;
      s = w[c].slot_cursor;
      w[c].slot_cursor = (s + 1) % K;
      w[c].slots[s].queued++;
      w[c].slots[s].user = q;
      w[c].chunks[q].slot = s;
      w[c].chunks[q].generation = w[c].slots[s].queued;
      to_producer[c] ! BYTES(w[c].sync_id, q);
      w[c].next++;
    fi
  od
}

inline start_transfers(c, chunk) {
  s = w[c].chunks[chunk].slot;
  if
  :: w[c].chunks[chunk].state == ready && USE_BEFORE_ENDED(c, s, chunk) ->
    w[c].chunks[chunk].state = transferring;
    w[c].transfers++;
    assert(w[c].slots[s].transfer == 0 && w[c].slots[s].scatter == 0);  // a receive slot written while in use
    b = w[c].chunks[chunk].serve_slot;
    w[c].slots[s].transfer = BYTES(w[c].sync_id, chunk);
    w[c].slots[s].from = b;
    w[c].slots[s].bytes = 0;
    // Bytes of another pull, or a slot that is being written.
    assert(left[c] || ring[b].bytes == BYTES(w[c].sync_id, chunk));
  :: else
  fi
}

inline end_failed(c) {
  w[c].state = failed;
  for (q : 0 .. CHUNKS - 1) {
    if
    :: q < w[c].next && w[c].chunks[q].state != landed && w[c].chunks[q].state != chunk_done -> send_signal(c, q);
    :: else
    fi;
    w[c].chunks[q].state = waiting; w[c].chunks[q].slot = 0; w[c].chunks[q].generation = 0;
    w[c].chunks[q].serve_slot = 0;
  }
  for (s : 0 .. K - 1) { w[c].slots[s].done = w[c].slots[s].queued; }
}

inline settle(c) {
  if
  :: w[c].state == updating && w[c].error && !in_flight(c) -> end_failed(c);
  :: else
  fi
}

inline advance(c) {
  if
  :: w[c].state == updating && !w[c].error ->
    issue(c);
    if
    :: w[c].done_count == CHUNKS ->
      w[c].state = prepared;
      for (q : 0 .. CHUNKS - 1) {
        w[c].chunks[q].state = waiting; w[c].chunks[q].slot = 0; w[c].chunks[q].generation = 0;
        w[c].chunks[q].serve_slot = 0;
      }
    :: else
    fi
  :: else
  fi;
  settle(c);
}

inline start_update(c) {
  w[c].state = updating;
  w[c].sync_id = open_sync;
  w[c].error = false;
  w[c].next = 0;
  w[c].done_count = 0;
  for (q : 0 .. CHUNKS - 1) { w[c].chunks[q].state = waiting; }
  for (s : 0 .. K - 1) {  // only differences count: begin them at 0 again, so that equal states are equal
    assert(w[c].slots[s].done == w[c].slots[s].queued);
    w[c].slots[s].done = 0;
    w[c].slots[s].queued = 0;
    w[c].slots[s].user = 0;
  }
  left[c] = false;
  advance(c);
}

// The transfer into receive slot `t` has ended: the bytes are there.
inline transfer_done(c, t) {
  b = w[c].slots[t].transfer;
  w[c].slots[t].transfer = 0;
  w[c].slots[t].from = 0;
  w[c].slots[t].bytes = b;
  m = CHUNK_OF(b);
  w[c].transfers--;
  if
  :: !w[c].error ->  // landed, end_reading, start_scatters
    w[c].chunks[m].state = landed;
    send_signal(c, m);
    assert(w[c].slots[t].bytes == BYTES(w[c].sync_id, m));
    w[c].slots[t].scatter = b;
    w[c].scatters++;
  :: else
  fi;
  advance(c);
}

// The scatter out of receive slot `t` has ended. It read the slot until now.
inline scatter_done(c, t) {
  b = w[c].slots[t].scatter;
  w[c].slots[t].scatter = 0;
  assert(w[c].slots[t].bytes == b);  // scattered other bytes than it asked for
  if
  :: SYNC_OF(b) != w[c].sync_id || w[c].state != updating  // dropped: unknown
  :: else ->
    m = CHUNK_OF(b);
    w[c].scatters--;
    w[c].chunks[m].state = chunk_done;
    w[c].slots[t].done = w[c].chunks[m].generation;
    if
    :: !w[c].error ->
      w[c].done_count++;
      if
      :: w[c].slots[t].user != m -> m = w[c].slots[t].user; start_transfers(c, m);
      :: else
      fi
    :: else
    fi;
    advance(c);
  fi
}

inline take_ready(c) {
  to_consumer[c] ? b, m;
  if
  :: OF_THIS_SYNC(c, b) && w[c].state == updating && !w[c].error &&
     w[c].chunks[CHUNK_OF(b)].state == asked ->  // awaited
    q = CHUNK_OF(b);
    w[c].chunks[q].state = ready;
    w[c].chunks[q].serve_slot = m;
    start_transfers(c, q);
  :: else  // stale_sync, unknown
  fi
}

proctype Consumer(byte c) {
  byte b, m, q, s;
  do
  :: atomic {
       w[c].sync_id < open_sync && w[c].state != updating && !in_flight(c) ->
       d_step { w[c].scatters = 0; start_update(c); b = 0; m = 0; q = 0; s = 0 }
     }
  :: atomic {  // it drains still: refused, and so the sync fails
       w[c].sync_id < open_sync && w[c].state == updating && w[c].error && !sync_failed -> sync_failed = true
     }
  :: atomic {  // SyncFailed of the sender, or FailConsumer because the replica was dropped
       w[c].state == updating && !w[c].error && (w[c].sync_id < open_sync || sync_failed || left[c]) ->
       d_step { w[c].error = true; settle(c); q = 0; s = 0 }
     }
  :: atomic { nempty(to_consumer[c]) -> d_step { take_ready(c); b = 0; m = 0; q = 0; s = 0 } }
  :: atomic {
       if
       :: w[c].slots[0].transfer != 0 -> s = 0
       :: w[c].slots[K - 1].transfer != 0 -> s = K - 1
       :: K > 2 && w[c].slots[1].transfer != 0 -> s = 1
       fi;
       d_step { q = s; transfer_done(c, q); b = 0; m = 0; q = 0; s = 0 }
     }
  :: atomic {
       if
       :: w[c].slots[0].scatter != 0 -> s = 0
       :: w[c].slots[K - 1].scatter != 0 -> s = K - 1
       :: K > 2 && w[c].slots[1].scatter != 0 -> s = 1
       fi;
       d_step { q = s; scatter_done(c, q); b = 0; m = 0; q = 0; s = 0 }
     }
  od
}

// ---- the sender --------------------------------------------------------------------------------------------------

#define OVER(c) (w[c].sync_id == open_sync && w[c].state != updating)

active proctype Sender() {
  atomic { run Consumer(0); run Consumer(1) }
  do
  :: atomic { open_sync == 0 -> open_sync = 1 }
  :: atomic { open_sync != 0 && !sync_failed -> sync_failed = true }
  // All committed (those that left are not waited for), or drained, or given up after drain_timeout_ns.
  :: atomic {
       open_sync != 0 && open_sync < SYNCS &&
       (sync_failed || ((left[0] || (OVER(0) && w[0].state == prepared)) &&
                        (left[1] || (OVER(1) && w[1].state == prepared)))) ->
       open_sync++; sync_failed = false;
     }
  od
}
