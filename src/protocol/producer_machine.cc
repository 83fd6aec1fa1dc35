// The producer's rules, and where each lives:
//
// - Early messages, per consumer, for the newest sync not begun here: Early; applied by begin_sync. Bounded:
// a
//   signal set over the model's groups, one pull per announced (chunk, run).
// - Free barrier: Group::signalled is a set over the consumers; `missing` counts the live ones not in it. A
//   group is freed when it is published, nothing is missing and no pack reads it: maybe_free.
// - Parked pulls, per consumer and seq: Serve. Pulls of what is read in place wait for their group, and where
//   they are summed for the Sum of their run, made once for all sharers: serve_in_place. Packed ones meet the
//   other sharers in a Meeting, and the last to arrive packs: try_pack.
// - Slots: slot = seq mod K. A slot is written when every live sharer has pulled that seq, which each does
// only
//   after its pull K earlier has landed. `readers` are those that were answered and have not shown yet that
//   they are done (by a later pull of the slot, a signal of the group, a newer sync, leaving).
// - Packs, and sums, outlive a failed sync: their tickets are kept apart from it, hold their slot, and delay
//   SyncQuiet.
// - Names: a sync of some names serves restrict_pulls of what each consumer announced (LaneState::running), kept
//   for the next sync of the same names. Everything by seq of a regular lane is by that table's seq.
// - Recovery lanes: what a consumer may have to pull here because another rank died. The same rules, but for
//   its seqs, which are counted as it issues: Serve::pull says what a seq is of. Its ring is its own, so that
//   a meeting is over with it alone.
// - Mapped reads, (consumer, group) answered with the tensors' places and not signalled, delay SyncQuiet too.
// - Watchdog: last_progress_ns; begin, publish, accepted signal, pack done, pull served.
#include "protocol/producer_machine.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "base/checked.h"
#include "base/plants.h"
#include "base/status_macros.h"
#include "plan/integrity.h"
#include "protocol/wording.h"

namespace shardpull {
namespace {

using namespace producer_action;  // NOLINT: this file is about them

constexpr std::uint32_t kNone = 0xFFFFFFFFu;

// What one consumer takes here, in all or in a sync of some names: its pulls by seq, and the seq of a (chunk,
// run).
struct PullTable {
  std::vector<std::shared_ptr<const PullDescription>> by_seq;
  std::unordered_map<std::uint64_t, std::uint32_t> seq_of;
  Digest128 digest;
  std::uint64_t slot_bytes = 0;

  static std::uint64_t key(std::uint32_t chunk, std::uint32_t run) {
    return std::uint64_t{chunk} << 32 | run;
  }
  void add(PullDescription pull) {
    seq_of.emplace(key(pull.chunk_id, pull.run), static_cast<std::uint32_t>(by_seq.size()));
    by_seq.push_back(std::make_shared<const PullDescription>(std::move(pull)));
  }
  std::shared_ptr<const PullDescription> find(std::uint32_t chunk, std::uint32_t run) const {
    const auto it = seq_of.find(key(chunk, run));
    return it == seq_of.end() ? nullptr : by_seq[it->second];
  }
};

// Messages of one consumer for a sync that has not begun here.
struct Early {
  std::uint64_t sync_id = 0;
  std::vector<PullId> pulls;  // one per (chunk, run), in order of arrival
  std::set<std::uint32_t> groups;
  bool by_control = false;  // any of the signals: it has no hot endpoint any more
  bool left = false;        // its lanes
  std::size_t size() const { return pulls.size() + groups.size() + (left ? 1 : 0); }
};

struct Serve {
  enum class State : std::uint8_t { kNone, kParked, kServed };
  State state = State::kNone;
  PullId id;
  std::shared_ptr<const PullDescription> pull;  // once it was asked for
};

// What one consumer takes here in one of its lanes.
struct LaneState {
  std::uint32_t ring = 0;                    // Lane::sharing_group
  std::shared_ptr<const PullTable> table;    // what it announced
  std::shared_ptr<const PullTable> running;  // what of it the sync has; with `table`, while it is live
  std::vector<Serve> serves;                 // by seq, this sync
};

struct Consumer {
  std::uint64_t incarnation = 0;  // 0: none known yet
  bool gone = false;
  bool live = false;  // in the running (or last) sync
  bool left = false;  // its lanes in that sync: it cannot reach this rank
  Status left_sync;   // why it is not live any more, where its replica has left that sync
  Early early;
  std::array<LaneState, 2> lanes;  // by LaneKind

  LaneState& lane(LaneKind kind) { return lanes[static_cast<std::size_t>(kind)]; }
  const LaneState& lane(LaneKind kind) const { return lanes[static_cast<std::size_t>(kind)]; }
};

// One of the pulls of this sync.
struct PullPlace {
  std::uint32_t consumer = 0;
  LaneKind lane = LaneKind::kRegular;
  std::uint32_t seq = 0;
};

// A table and what a set of names leaves of it.
struct Part {
  std::shared_ptr<const PullTable> whole, part;
};

struct Slot {
  std::uint64_t ticket = 0;  // of the pack that writes it; 0: none
  std::uint64_t sync_id = 0;
  std::uint32_t seq = kNone;  // what it holds, of `sync_id`; kNone: nothing
  std::uint32_t group = 0;
  std::vector<std::uint64_t> sums;
  std::vector<std::uint32_t> readers;
  bool busy() const { return ticket != 0 || !readers.empty(); }
};

struct WaitingReserve {
  std::uint32_t consumer = 0;
  std::uint64_t incarnation = 0;
  LaneKind lane = LaneKind::kRegular;
  std::uint32_t depth = 0;  // slots it needs
  std::shared_ptr<const PullTable> table;
};

// The live sharers' appointment for one seq.
struct Meeting {
  std::vector<std::uint32_t> arrived;
  std::uint64_t ticket = 0;
};

// One lane's serve ring and who meets there: a sharing group, or the one consumer of a recovery lane.
struct Ring {
  LaneKind kind = LaneKind::kRegular;
  std::uint32_t depth = 0;       // slots
  std::uint64_t slot_bytes = 0;  // allocated
  std::uint32_t asked_depth = 0;
  std::uint64_t asked_bytes = 0;  // of the AllocateRing under way; 0: none
  std::vector<Slot> slots;
  std::vector<WaitingReserve> waiting;
  std::map<std::uint32_t, Meeting> meetings;  // by seq, this sync
  std::uint32_t live_sharers = 0;

  bool busy() const {
    return std::any_of(slots.begin(), slots.end(), [](const Slot& slot) { return slot.busy(); });
  }
};

// The sums of a run that is read in place: being made, or there.
struct RunSums {
  bool made = false;
  std::vector<std::uint64_t> sums;
};

struct Group {
  std::vector<std::pair<std::uint32_t, std::uint32_t>>
      held;  // (name, piece) published here, ascending; empty: not owned
  // This sync:
  bool in_sync = false, published = false, freed = false;
  std::vector<PublishedView> views;  // ascending by (name, piece)
  std::vector<bool> signalled;       // by consumer
  std::uint32_t missing = 0;         // live consumers that have not signalled
  std::uint32_t packs = 0;           // packs and sums that read it
  std::vector<PullPlace> parked_in_place;
  std::map<std::shared_ptr<const PullDescription>, RunSums> sums;        // of what is read in place
  std::vector<std::pair<std::uint32_t, std::uint32_t>> meetings;         // (ring, seq)
};

struct ActivePack {
  std::uint64_t sync_id = 0;
  std::shared_ptr<const PullDescription> pull;
  std::uint32_t ring = 0, slot = 0;  // kNone: a sum
  std::uint32_t seq = 0;
};

bool fits(const PublishedView& view) {
  const int bits = dtype_bits(view.dtype);
  std::int64_t last = 0;  // index of the last element, from the first
  std::int64_t numel = 1;
  for (std::size_t d = view.shape.size(); d-- > 0;) {
    const std::int64_t size = view.shape[d];
    if (size < 0) return false;
    if (size == 0) return true;
    const std::int64_t stride = view.location.stride.empty() ? numel : view.location.stride[d];
    if (stride < 0) return false;
    const auto reach = checked_mul(size - 1, stride);
    const auto sum = reach ? checked_add(last, *reach) : std::nullopt;
    const auto count = checked_mul(numel, size);
    if (!sum || !count) return false;
    last = *sum;
    numel = *count;
  }
  const auto elements = checked_add(last, 1);
  const auto all_bits = elements ? checked_mul(*elements, bits) : std::nullopt;
  return all_bits &&
         static_cast<std::uint64_t>(ceil_div<std::int64_t>(*all_bits, 8)) <= view.location.where.bytes;
}

}  // namespace

struct ProducerMachine::State {
  explicit State(ProducerConfig given) : config(std::move(given)), tables(*config.tables) {
    consumers.resize(tables.num_consumers);
    sharing = effective_workers_per_replica(tables);
    replica = std::max(1u, tables.num_consumers / std::max(1u, tables.num_replicas));
    for (std::uint32_t ring = 0; ring < sharing; ++ring) rings[ring].depth = tables.ring_depth;
    for (std::uint32_t c = 0; c < consumers.size(); ++c) {
      consumers[c].lane(LaneKind::kRegular).ring = c % sharing;
      consumers[c].lane(LaneKind::kRecovery).ring = sharing + c;
    }
    groups.resize(tables.group_lens.size());
    group_of = group_of_names(tables);
    const Ownership& own = tables.ownership;
    const auto owns = [&](std::int32_t owner_class) {
      const auto& set = own.owner_sets[static_cast<std::size_t>(owner_class)];
      return std::binary_search(set.begin(), set.end(), config.rank);
    };
    for (std::uint32_t name = 0; name < group_of.size(); ++name) {
      const bool held = own.name_owner_class.empty() ||
                        (own.name_owner_class[name] >= 0 && owns(own.name_owner_class[name]));
      if (held) groups[group_of[name]].held.emplace_back(name, 0);
    }
    for (std::uint32_t piece = 0; piece < own.pieces.size(); ++piece) {
      if (owns(static_cast<std::int32_t>(own.pieces[piece].owner_class))) {
        groups[group_of[own.pieces[piece].name]].held.emplace_back(own.pieces[piece].name, piece + 1);
      }
    }
    for (Group& group : groups) std::sort(group.held.begin(), group.held.end());
  }

  const ProducerConfig config;
  const InitTables& tables;
  std::uint32_t sharing = 1;  // ids equal modulo this share slots
  std::uint32_t replica = 1;  // workers of one replica
  std::vector<std::uint32_t> group_of;

  std::vector<Consumer> consumers;
  std::map<std::uint32_t, Ring> rings;  // by Lane::sharing_group; those of recovery lanes once announced
  std::vector<Group> groups;
  std::set<std::uint32_t> waiting_rings;  // those with announcements that wait for memory
  std::map<std::uint64_t, ActivePack> packs;
  std::map<std::uint64_t, std::optional<std::int64_t>>
      unquiet;  // failed syncs whose SyncQuiet is due, since when (by tick())
  std::map<std::uint64_t, std::set<std::pair<std::uint32_t, std::uint32_t>>>
      mapped_reads;  // by sync: (consumer, group)
  std::uint64_t next_ticket = 1;
  std::uint64_t packs_done = 0, bytes_packed = 0;
  NameSet part_names;                      // of the last sync of some names
  std::map<const PullTable*, Part> parts;  // of it, by `whole`
  DropCounters drops;
  bool shut = false;

  // The running (or last) sync.
  std::uint64_t sync_id = 0;
  bool running = false, ending = false;
  std::uint64_t version = 0;
  NameSet names;  // empty: all
  std::uint32_t live_count = 0;
  std::uint32_t unpublished = 0, unfreed = 0;
  std::int64_t last_progress_ns = 0;
  Status failure;
  std::uint64_t opened_id = 0;
  std::map<std::uint32_t, std::uint64_t> opened_lives;  // by consumer; 0: not known yet
  std::uint64_t early_failure_id = 0;
  Status early_failure;

  std::string me() const { return trainer_name(config.rank); }

  // ---- replies ----------------------------------------------------------------------------------

  static void refuse(std::uint64_t incarnation, const PullId& pull, Status why, ProducerActions& out) {
    out.push_back(FailReply{incarnation, pull, std::move(why)});
  }

  Serve& serve_of(const PullPlace& place) {
    return consumers[place.consumer].lane(place.lane).serves[place.seq];
  }

  void unpark(const PullPlace& place, const Status& why, ProducerActions& out) {
    Serve& serve = serve_of(place);
    if (serve.state != Serve::State::kParked) return;
    serve.state = Serve::State::kNone;
    refuse(consumers[place.consumer].incarnation, serve.id, why, out);
  }

  // All of a consumer.
  void unpark_all(std::uint32_t consumer, const Status& why, ProducerActions& out) {
    for (const LaneKind kind : {LaneKind::kRegular, LaneKind::kRecovery}) {
      for (std::uint32_t seq = 0; seq < consumers[consumer].lane(kind).serves.size(); ++seq)
        unpark({consumer, kind, seq}, why, out);
    }
  }

  // The same seq served once more is not progress: a consumer that only repeats itself must not hold the
  // watchdog off.
  void answer(std::int64_t now_ns, const PullPlace& place, ReadyInfo ready, ProducerActions& out) {
    Serve& serve = serve_of(place);
    if (serve.state != Serve::State::kServed) last_progress_ns = now_ns;
    serve.state = Serve::State::kServed;
    if (ready.path != Path::kPacked) mapped_reads[sync_id].emplace(place.consumer, serve.pull->group);
    out.push_back(ReadyReply{consumers[place.consumer].incarnation, serve.id, std::move(ready)});
  }

  // ---- published views --------------------------------------------------------------------------

  // One location per distinct (name, piece) of the pull, in order of first use among its keys.
  std::vector<PublishedView> sources_of(const PullDescription& pull) const {
    const Group& group = groups[pull.group];
    std::vector<PublishedView> sources;
    std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
    for (const ChunkKey& key : pull.keys) {
      if (!seen.emplace(key.name, key.piece).second) continue;
      const auto it = std::lower_bound(
          group.views.begin(), group.views.end(), std::pair(key.name, key.piece),
          [](const PublishedView& view, const std::pair<std::uint32_t, std::uint32_t>& what) {
            return std::pair(view.name, view.piece) < what;
          });
      sources.push_back(*it);  // there: reserve() checked the key against `held`, publish_group() the views
    }
    return sources;
  }

  ReadyInfo in_place_ready(const std::shared_ptr<const PullDescription>& pull) const {
    ReadyInfo ready;
    ready.path = pull->path;
    ready.sharing_group = pull->lane.sharing_group;
    ready.bytes = pull->bytes;
    for (PublishedView& view : sources_of(*pull)) ready.entries.push_back(std::move(view.location));
    const auto sums = groups[pull->group].sums.find(pull);
    if (sums != groups[pull->group].sums.end()) ready.sums = sums->second.sums;
    return ready;
  }

  // Answers a parked pull of published tensors that are read in place, or lets it wait for the run's sums.
  void serve_in_place(std::int64_t now_ns, const PullPlace& place, ProducerActions& out) {
    const std::shared_ptr<const PullDescription> pull = serve_of(place).pull;
    Group& group = groups[pull->group];
    if (summed(tables, pull->path)) {
      const auto [sums, fresh] = group.sums.try_emplace(pull);
      if (fresh) {
        const std::uint64_t ticket = next_ticket++;
        ++group.packs;
        packs.emplace(ticket, ActivePack{sync_id, pull, kNone, kNone, place.seq});
        out.push_back(Sum{ticket, pull, sources_of(*pull)});
      }
      if (!sums->second.made) {
        group.parked_in_place.push_back(place);
        return;
      }
    }
    answer(now_ns, place, in_place_ready(pull), out);
  }

  static ReadyInfo packed_ready(const PullDescription& pull, std::uint32_t slot_index, const Slot& slot) {
    ReadyInfo ready;
    ready.path = pull.path;
    ready.sharing_group = pull.lane.sharing_group;
    ready.slot = slot_index;
    ready.bytes = pull.bytes;
    ready.sums = slot.sums;
    return ready;
  }

  // ---- packing ----------------------------------------------------------------------------------

  // Starts the pack of a meeting when every live sharer is there, the group is published and the slot is
  // free.
  void try_pack(std::uint32_t ring_id, std::uint32_t seq, ProducerActions& out) {
    Ring& ring = rings.at(ring_id);
    const auto it = ring.meetings.find(seq);
    if (!running || it == ring.meetings.end() || it->second.ticket != 0 || it->second.arrived.empty()) return;
    Meeting& meeting = it->second;
    const auto& pull = serve_of({meeting.arrived.front(), ring.kind, seq}).pull;
    Group& group = groups[pull->group];
    // Only live consumers that have not left the lane have arrived, each once.
    if (meeting.arrived.size() != ring.live_sharers && !SHARDPULL_PLANT("pack-before-all-sharers")) return;
    if (!group.published || ring.asked_bytes != 0 || ring.slots.empty()) return;
    const std::uint32_t index =
        (SHARDPULL_PLANT("slot-by-arrival") ? static_cast<std::uint32_t>(packs_done) : seq) % ring.depth;
    Slot& slot = ring.slots[index];
    if (slot.ticket != 0) return;  // a pack of an earlier sync still writes it

    const std::uint64_t ticket = next_ticket++;
    // Sharers that have left may still read the slot: they have no part in any sync that could be committed.
    slot = Slot{};
    slot.ticket = ticket;
    slot.sync_id = sync_id;
    slot.group = pull->group;
    meeting.ticket = ticket;
    ++group.packs;
    packs.emplace(ticket, ActivePack{sync_id, pull, ring_id, index, seq});
    out.push_back(Pack{ticket, ring_id, index, pull, sources_of(*pull), summed(tables, pull->path)});
  }

  void try_all_packs(std::uint32_t ring_id, ProducerActions& out) {
    std::vector<std::uint32_t> seqs;
    for (const auto& [seq, meeting] : rings.at(ring_id).meetings) seqs.push_back(seq);
    for (const std::uint32_t seq : seqs) try_pack(ring_id, seq, out);
  }

  // ---- slots being read -------------------------------------------------------------------------

  template <typename Predicate>
  void stop_reading(std::uint32_t consumer, Predicate which) {
    for (const LaneState& lane : consumers[consumer].lanes) {
      const auto ring = rings.find(lane.ring);
      if (ring == rings.end()) continue;
      for (Slot& slot : ring->second.slots) {
        if (which(slot)) std::erase(slot.readers, consumer);
      }
    }
  }
  // What it sends in this sync shows that its reads of earlier ones have ended: a worker starts a sync with
  // nothing in flight.
  void stop_reading_earlier_syncs(std::uint32_t consumer) {
    stop_reading(consumer, [&](const Slot& slot) { return slot.sync_id != sync_id; });
    for (auto& [sync, reads] : mapped_reads) {
      if (sync != sync_id) std::erase_if(reads, [&](const auto& read) { return read.first == consumer; });
    }
  }
  void stop_reading_group(std::uint32_t consumer, std::uint64_t sync, std::uint32_t group) {
    stop_reading(consumer, [&](const Slot& slot) { return slot.sync_id == sync && slot.group == group; });
    const auto reads = mapped_reads.find(sync);
    if (reads != mapped_reads.end()) reads->second.erase({consumer, group});
  }
  void stop_reading_all(std::uint32_t consumer) {
    stop_reading(consumer, [](const Slot&) { return true; });
    for (auto& [sync, reads] : mapped_reads) {
      std::erase_if(reads, [&](const auto& read) { return read.first == consumer; });
    }
  }

  // ---- the barrier ------------------------------------------------------------------------------

  void maybe_free(std::uint32_t g, ProducerActions& out) {
    Group& group = groups[g];
    if (!running || !group.in_sync || !group.published || group.freed || group.missing != 0 ||
        (group.packs != 0 && !SHARDPULL_PLANT("freed-under-a-pack")))
      return;
    group.freed = true;
    --unfreed;
    const Status freed = freed_status(g);
    for (const PullPlace& place : std::exchange(group.parked_in_place, {})) unpark(place, freed, out);
    for (const auto& [ring_id, seq] : std::exchange(group.meetings, {})) {
      Ring& ring = rings.at(ring_id);
      const auto it = ring.meetings.find(seq);
      if (it == ring.meetings.end()) continue;
      for (const std::uint32_t consumer : it->second.arrived) unpark({consumer, ring.kind, seq}, freed, out);
      ring.meetings.erase(it);
    }
    group.views.clear();
    group.sums.clear();
    out.push_back(GroupFreed{sync_id, g});
  }

  Status freed_status(std::uint32_t g) const {
    return peer_error(StatusCode::kFailedPrecondition, {},
                      fmt::format("{}: group {} has been freed in sync {}", me(), g, sync_id));
  }

  // ---- the end of a sync ------------------------------------------------------------------------

  void fail_sync(const Status& why, ProducerActions& out) {
    if (!running) return;
    failure = why;
    running = ending = false;
    for (std::uint32_t c = 0; c < consumers.size(); ++c) unpark_all(c, why, out);
    for (auto& [id, ring] : rings) ring.meetings.clear();
    for (Group& group : groups) {
      group.views.clear();
      group.sums.clear();
      group.parked_in_place.clear();
      group.meetings.clear();
    }
    out.push_back(SyncFailed{sync_id, why});
    unquiet.emplace(sync_id, std::nullopt);
    settle_quiet(out);
  }

  void settle_quiet(ProducerActions& out) {
    std::erase_if(unquiet, [&](const auto& failed) {
      const auto reads = mapped_reads.find(failed.first);
      if (reads != mapped_reads.end() && !reads->second.empty()) return false;
      for (const auto& [ticket, pack] : packs) {
        if (pack.sync_id == failed.first) return false;
      }
      mapped_reads.erase(failed.first);
      out.push_back(SyncQuiet{failed.first});
      return true;
    });
  }

  bool anything_parked() const {
    for (const Consumer& consumer : consumers) {
      for (const LaneState& lane : consumer.lanes) {
        for (const Serve& serve : lane.serves) {
          if (serve.state == Serve::State::kParked) return true;
        }
      }
    }
    return false;
  }

  bool anything_read() const {
    for (const auto& [id, ring] : rings) {
      for (const Slot& slot : ring.slots) {
        if (slot.sync_id != sync_id) continue;
        if (slot.ticket != 0) return true;
        for (const std::uint32_t reader : slot.readers) {
          if (consumers[reader].live) return true;
        }
      }
    }
    return false;
  }

  // Whatever may follow from an event: a failed sync that is quiet, the end of the sync, a ring that waited
  // for its last reader.
  void settle(ProducerActions& out) {
    if (!unquiet.empty()) settle_quiet(out);
    if (running && ending && unfreed == 0 && !anything_parked() && !anything_read()) {
      running = ending = false;
      mapped_reads.erase(sync_id);
      out.push_back(SyncEnded{sync_id});
    }
    for (auto it = waiting_rings.begin(); it != waiting_rings.end();) {
      settle_ring(*it, out);
      it = rings.at(*it).waiting.empty() ? waiting_rings.erase(it) : std::next(it);
    }
  }

  // ---- reserving --------------------------------------------------------------------------------

  void settle_ring(std::uint32_t ring_id, ProducerActions& out) {
    Ring& ring = rings.at(ring_id);
    if (ring.asked_bytes != 0) return;
    std::uint64_t wanted = 0;
    std::uint32_t depth = ring.depth;
    for (const WaitingReserve& waiting : ring.waiting) {
      wanted = std::max(wanted, waiting.table->slot_bytes);
      depth = waiting.depth;  // all alike: those of regular lanes have K, a recovery lane has one consumer
    }
    if (ring.slots.empty()) ring.depth = depth;  // so far only read in place, if at all
    if (wanted <= ring.slot_bytes && depth == ring.depth) {
      for (WaitingReserve& waiting : std::exchange(ring.waiting, {})) record(waiting, out);
      return;
    }
    if (ring.busy()) return;
    ring.asked_depth = depth;
    ring.asked_bytes = std::max(wanted, ring.slot_bytes);
    out.push_back(AllocateRing{ring_id, depth, ring.asked_bytes});
  }

  void record(WaitingReserve& waiting, ProducerActions& out) {
    Consumer& consumer = consumers[waiting.consumer];
    LaneState& lane = consumer.lane(waiting.lane);
    lane.table = std::move(waiting.table);
    if (consumer.live) choose_table(lane);
    out.push_back(ReserveReply{waiting.consumer, waiting.incarnation, waiting.lane, {}});
  }

  // What of its announcement the running sync has.
  void choose_table(LaneState& lane) {
    lane.running = lane.table;
    if (lane.table == nullptr) return;
    if (!names.empty()) {
      Part& part = parts[lane.table.get()];
      if (part.part == nullptr) {
        std::vector<PullDescription> pulls;
        for (const auto& pull : lane.table->by_seq) pulls.push_back(*pull);
        auto table = std::make_shared<PullTable>();
        for (PullDescription& pull : restrict_pulls(pulls, names)) table->add(std::move(pull));
        part = {lane.table, std::move(table)};
      }
      lane.running = part.part;
    }
    lane.serves.resize(std::max(lane.serves.size(), lane.running->by_seq.size()));
  }

  Status check_settings(std::uint32_t consumer, std::uint32_t ring_depth, std::uint32_t num_consumers,
                        std::uint32_t workers_per_replica) const {
    const auto differs = [&](std::string_view setting, std::uint32_t theirs, std::uint32_t ours) {
      return peer_error(
          StatusCode::kFailedPrecondition, worker_name(consumer),
          fmt::format("{} of {} is {}, of {} {}", setting, worker_name(consumer), theirs, me(), ours),
          Reason::kSettingMismatch);
    };
    if (num_consumers != tables.num_consumers)
      return differs("num_consumers", num_consumers, tables.num_consumers);
    if (ring_depth != tables.ring_depth) return differs("ring_depth", ring_depth, tables.ring_depth);
    if (workers_per_replica != sharing && !(workers_per_replica == 0 && sharing == tables.num_consumers)) {
      return differs("workers_per_replica", workers_per_replica, sharing);
    }
    return {};
  }

  Status check_descriptions(std::uint32_t consumer, const std::vector<PullDescription>& pulls,
                            std::uint64_t slot_bytes, PullTable& table) const {
    const auto refuse = [&](std::string message) {
      return peer_error(StatusCode::kInvalidArgument, worker_name(consumer),
                        fmt::format("{}: {}", worker_name(consumer), message), Reason::kPlanInvalid);
    };
    if (Status status = check_pulls(pulls, tables, config.rank); !status.ok()) {
      return status.with_context(worker_name(consumer));
    }
    for (const PullDescription& pull : pulls) {  // in seq order, distinct, of known groups: checked above
      const std::string what = fmt::format("chunk {} run {}", pull.chunk_id, pull.run);
      if (const std::uint32_t ring = consumers[consumer].lane(pull.lane.kind).ring;
          pull.lane.sharing_group != ring) {
        return refuse(fmt::format("{} is in the lane of sharing group {}, not {}", what,
                                  pull.lane.sharing_group, ring));
      }
      if (pull.path == Path::kPacked && pull.bytes > slot_bytes) {
        return refuse(
            fmt::format("{} packs {} bytes, more than the {} bytes reserved", what, pull.bytes, slot_bytes));
      }
      const auto& held = groups[pull.group].held;
      for (const ChunkKey& key : pull.keys) {
        if (!std::binary_search(held.begin(), held.end(), std::pair(key.name, key.piece))) {
          return refuse(fmt::format("{} asks for '{}', which {} never serves in group {}", what,
                                    tables.metadata[key.name].name, me(), pull.group));
        }
      }
      table.add(pull);
    }
    return {};
  }

  // The other sharers that have announced, or are about to have.
  Status check_sharers(std::uint32_t consumer, const PullTable& table) const {
    const auto differs = [&](std::uint32_t other, std::string what) {
      return peer_error(StatusCode::kFailedPrecondition, worker_name(consumer),
                        fmt::format("{} and {} share serve slots of {} but {}", worker_name(consumer),
                                    worker_name(other), me(), what),
                        Reason::kSettingMismatch);
    };
    const auto compare = [&](std::uint32_t other, const PullTable& theirs) -> Status {
      if (theirs.digest != table.digest) {
        return differs(other, fmt::format("their plans differ: digests {} and {}", to_string(table.digest),
                                          to_string(theirs.digest)));
      }
      for (std::size_t seq = 0; seq < table.by_seq.size(); ++seq) {  // what the digest does not cover
        const PullDescription &ours = *table.by_seq[seq], &other_one = *theirs.by_seq[seq];
        if (ours != other_one) {
          return differs(
              other, fmt::format("describe chunk {} differently: path {}, group {} and path {}, group {}",
                                 ours.chunk_id, to_string(ours.path), ours.group, to_string(other_one.path),
                                 other_one.group));
        }
      }
      return {};
    };
    const PullTable* compared = nullptr;  // equal tables are one object: reserve()
    for (std::uint32_t c = consumer % sharing; c < tables.num_consumers; c += sharing) {
      const auto& theirs = consumers[c].lane(LaneKind::kRegular).table;
      if (c == consumer || consumers[c].gone || !theirs || theirs.get() == compared) continue;
      SHARDPULL_RETURN_IF_ERROR(compare(c, *theirs));
      compared = theirs.get();
    }
    for (const WaitingReserve& waiting : rings.at(consumer % sharing).waiting) {
      if (waiting.consumer == consumer) continue;
      SHARDPULL_RETURN_IF_ERROR(compare(waiting.consumer, *waiting.table));
    }
    return {};
  }

  // A waiting announcement that its own consumer has replaced, or whose process is gone.
  void drop_waiting(std::uint32_t consumer, LaneKind lane, const Status& why, ProducerActions& out) {
    const auto ring = rings.find(consumers[consumer].lane(lane).ring);
    if (ring == rings.end()) return;
    std::erase_if(ring->second.waiting, [&](const WaitingReserve& waiting) {
      if (waiting.consumer != consumer) return false;
      out.push_back(ReserveReply{consumer, waiting.incarnation, lane, why});
      return true;
    });
  }

  // ---- the live set -----------------------------------------------------------------------------

  // Takes the consumer out of its lanes of the running sync. The rings whose packs may have waited for it.
  std::set<std::uint32_t> part_from_sharers(std::uint32_t c, const Status& why, ProducerActions& out) {
    if (std::exchange(consumers[c].left, true)) return {};
    std::set<std::uint32_t> touched;
    for (Group& group : groups)
      std::erase_if(group.parked_in_place, [&](const PullPlace& parked) { return parked.consumer == c; });
    for (const LaneState& lane : consumers[c].lanes) {
      const auto ring = rings.find(lane.ring);
      if (ring == rings.end()) continue;
      --ring->second.live_sharers;
      touched.insert(lane.ring);
      auto& meetings = ring->second.meetings;
      for (auto it = meetings.begin(); it != meetings.end();) {
        std::erase(it->second.arrived, c);
        it = it->second.arrived.empty() && it->second.ticket == 0 ? meetings.erase(it) : std::next(it);
      }
    }
    unpark_all(c, why, out);
    return touched;
  }

  Status out_of_reach(std::uint32_t consumer) const {
    return Status(StatusCode::kUnavailable,
                  fmt::format("{}: {} has left its lanes in sync {}", me(), worker_name(consumer), sync_id),
                  {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = worker_name(consumer)});
  }
  void leave_lanes(std::uint32_t consumer, ProducerActions& out) {
    if (SHARDPULL_PLANT("sharers-wait-for-one-that-left")) return;
    if (!running || !consumers[consumer].live || consumers[consumer].left) return;
    stop_reading(consumer, [](const Slot&) { return true; });
    for (const std::uint32_t ring : part_from_sharers(consumer, out_of_reach(consumer), out))
      try_all_packs(ring, out);
  }

  // Takes the consumer's replica out of the running sync.
  void leave_sync(std::uint32_t consumer, const Status& why, ProducerActions& out) {
    if (!running || !consumers[consumer].live) return;
    const Status lost =
        Status(StatusCode::kUnavailable,
               fmt::format("{} was lost in sync {}: {}", worker_name(consumer), sync_id,
                           why.ok() ? "gone" : why.message()),
               {.reason = Reason::kPeerLost, .fault = Fault::kPeer, .peer = worker_name(consumer)});
    if (config.fail_on_consumer_loss) return fail_sync(lost, out);
    const std::uint32_t first = consumer / replica * replica;
    std::set<std::uint32_t> touched;
    for (std::uint32_t c = first; c < std::min(first + replica, tables.num_consumers); ++c) {
      if (!consumers[c].live) continue;
      consumers[c].live = false;
      consumers[c].left_sync = lost;
      --live_count;
      stop_reading_all(c);
      for (Group& group : groups) {
        if (group.in_sync && !group.signalled[c]) --group.missing;
      }
      touched.merge(part_from_sharers(c, lost, out));
    }
    if (live_count == 0) return fail_sync(lost, out);
    for (const std::uint32_t ring : touched) try_all_packs(ring, out);
    for (std::uint32_t g = 0; g < groups.size(); ++g) maybe_free(g, out);
  }

  // Makes `incarnation` the consumer's life. False for one that was declared lost: a zombie.
  bool new_life(std::uint32_t consumer, std::uint64_t incarnation, ProducerActions& out) {
    Consumer& state = consumers[consumer];
    if (state.incarnation == incarnation) return !state.gone;
    if (state.incarnation != 0) {
      const Status restarted =
          peer_error(StatusCode::kUnavailable, worker_name(consumer), "restarted", Reason::kPeerLost);
      forget_life(consumer, restarted, out);
    }
    state.incarnation = incarnation;
    state.gone = false;
    return true;
  }

  void forget_life(std::uint32_t consumer, const Status& why, ProducerActions& out) {
    Consumer& state = consumers[consumer];
    for (const LaneKind kind : {LaneKind::kRegular, LaneKind::kRecovery}) drop_waiting(consumer, kind, why, out);
    leave_sync(consumer, why, out);
    drops.stale_incarnation += state.early.size();
    state.early = {};
    for (LaneState& lane : state.lanes) lane.table = lane.running = nullptr;
    stop_reading_all(consumer);
  }

  // What is kept of the consumer for a sync that has not begun here: of the newest only. Null: the sync is
  // not that.
  Early* early_of(std::uint32_t consumer, std::uint64_t sync) {
    Early& early = consumers[consumer].early;
    if (sync <= sync_id || sync < early.sync_id) {
      ++drops.stale_sync;
      return nullptr;
    }
    if (sync > early.sync_id) {
      drops.stale_sync += early.size();
      early = Early{};
      early.sync_id = sync;
    }
    return &early;
  }

  // ---- messages of the running sync -------------------------------------------------------------

  void apply_signals(std::int64_t now_ns, std::uint32_t consumer, const std::vector<std::uint32_t>& signalled,
                     bool by_control, ProducerActions& out) {
    std::vector<std::uint32_t> acknowledged;
    std::vector<std::uint32_t> fresh;
    for (const std::uint32_t g : signalled) {
      if (g >= groups.size() || !groups[g].in_sync) {
        ++drops.unknown;
        continue;
      }
      acknowledged.push_back(g);
      stop_reading_group(consumer, sync_id, g);
      if (groups[g].signalled[consumer] && !SHARDPULL_PLANT("signals-are-counted")) {
        ++drops.duplicate_signals;
        continue;
      }
      if (!running) continue;  // failed: that it reads no longer is all it says
      groups[g].signalled[consumer] = true;
      groups[g].missing -= groups[g].missing == 0 ? 0 : 1;
      if (SHARDPULL_PLANT("freed-by-the-first-signal")) groups[g].missing = 0;
      last_progress_ns = now_ns;
      fresh.push_back(g);
    }
    stop_reading_earlier_syncs(consumer);
    if (!acknowledged.empty()) {
      out.push_back(
          SignalAck{consumers[consumer].incarnation, consumer, sync_id, std::move(acknowledged), by_control});
    }
    for (const std::uint32_t g : fresh) {
      // It will not read what it still waits for. (Packed pulls stay: the other sharers count on the
      // meeting.)
      std::erase_if(groups[g].parked_in_place, [&](const PullPlace& parked) {
        if (parked.consumer != consumer) return false;
        unpark(parked,
               peer_error(StatusCode::kCancelled, worker_name(consumer),
                          fmt::format("{}: {} signalled group {} meanwhile", me(), worker_name(consumer), g)),
               out);
        return true;
      });
      maybe_free(g, out);
    }
  }

  void admit(std::int64_t now_ns, const PullId& pull, ProducerActions& out) {
    Consumer& consumer = consumers[pull.consumer];
    const auto no = [&](StatusCode code, std::string message) {
      refuse(consumer.incarnation, pull,
             peer_error(code, worker_name(pull.consumer), fmt::format("{}: {}", me(), std::move(message))),
             out);
    };
    if (!failure.ok()) return refuse(consumer.incarnation, pull, failure, out);
    if (!consumer.live) {
      ++drops.not_live;
      const Status& why = consumer.left_sync;
      return no(StatusCode::kFailedPrecondition,
                fmt::format("{} is not live in sync {}{}{}", worker_name(pull.consumer), sync_id,
                            why.ok() ? "" : ": ", why.message()));
    }
    if (consumer.left) return refuse(consumer.incarnation, pull, out_of_reach(pull.consumer), out);
    LaneState& lane = consumer.lane(pull.lane);
    const std::shared_ptr<const PullDescription> known = lane.running->find(pull.chunk, pull.run);
    if (known == nullptr) {
      if (lane.table->find(pull.chunk, pull.run) != nullptr) {
        return no(StatusCode::kFailedPrecondition,
                  fmt::format("chunk {} run {} of {} has none of the names of sync {}", pull.chunk, pull.run,
                              worker_name(pull.consumer), sync_id));
      }
      return no(StatusCode::kNotFound, fmt::format("{} has not announced chunk {} run {}",
                                                   worker_name(pull.consumer), pull.chunk, pull.run));
    }
    const auto what = [&] {
      return fmt::format("chunk {} of {} (seq {})", pull.chunk, worker_name(pull.consumer), pull.seq);
    };
    if (pull.lane == LaneKind::kRegular && known->seq != pull.seq) {
      return no(StatusCode::kInvalidArgument, fmt::format("{}: its seq is {}", what(), known->seq));
    }
    if (pull.seq >= lane.serves.size()) {
      return no(StatusCode::kInvalidArgument,
                fmt::format("{}: its lane has {} pulls", what(), lane.serves.size()));
    }
    Serve& serve = lane.serves[pull.seq];
    if (serve.pull != nullptr && (serve.pull->chunk_id != pull.chunk || serve.pull->run != pull.run)) {
      return no(StatusCode::kInvalidArgument,
                fmt::format("{}: that seq is chunk {}'s", what(), serve.pull->chunk_id));
    }
    Group& group = groups[known->group];
    if (!group.in_sync) {
      return no(StatusCode::kFailedPrecondition,
                fmt::format("{}: group {} is not part of sync {}", what(), known->group, sync_id));
    }
    if (group.freed)
      return refuse(consumer.incarnation, pull, freed_status(known->group).with_context(what()), out);
    if (group.signalled[pull.consumer]) {
      return no(
          StatusCode::kFailedPrecondition,
          fmt::format("{}: group {} was already signalled by it in sync {}", what(), known->group, sync_id));
    }
    Ring& ring = rings.at(lane.ring);
    const std::uint32_t depth = ring.depth;
    if (pull.seq >= depth && lane.serves[pull.seq - depth].state != Serve::State::kServed) {
      return no(StatusCode::kFailedPrecondition,
                fmt::format("{}: too early, seq {} has not been served to it ({} slots)", what(),
                            pull.seq - depth, depth));
    }

    const PullPlace place{pull.consumer, pull.lane, pull.seq};
    if (serve.state == Serve::State::kParked) {  // asked again: one answer, to the latest try
      serve.id = pull;
      return;
    }
    if (serve.state == Serve::State::kServed) {
      serve.id = pull;
      if (known->path != Path::kPacked) return answer(now_ns, place, in_place_ready(known), out);
      const Slot& slot = ring.slots[pull.seq % depth];
      if ((slot.sync_id == sync_id && slot.seq == pull.seq) || SHARDPULL_PLANT("retry-gets-what-the-slot-holds")) {
        return answer(now_ns, place, packed_ready(*known, pull.seq % depth, slot), out);
      }
      return no(StatusCode::kFailedPrecondition,
                fmt::format("{}: served before, and its slot holds a later one", what()));
    }

    serve = Serve{Serve::State::kParked, pull, known};
    if (known->path != Path::kPacked) {
      if (group.published) return serve_in_place(now_ns, place, out);
      group.parked_in_place.push_back(place);
      return;
    }
    stop_reading_earlier_syncs(pull.consumer);
    // Issued at this depth, the consumer has landed what it read from this slot before.
    stop_reading(pull.consumer, [&](const Slot& slot) { return &slot == &ring.slots[pull.seq % depth]; });
    Meeting& meeting = ring.meetings[pull.seq];
    if (meeting.arrived.empty()) group.meetings.emplace_back(lane.ring, pull.seq);
    meeting.arrived.push_back(pull.consumer);
    try_pack(lane.ring, pull.seq, out);
  }

  // What the sync waits for, for the watchdog's message.
  std::string waited_for() const {
    std::vector<std::uint32_t> unpublished_groups, unfreed_groups;
    std::string signals;
    std::size_t listed = 0;
    for (std::uint32_t g = 0; g < groups.size(); ++g) {
      const Group& group = groups[g];
      if (!group.in_sync || group.freed) continue;
      unfreed_groups.push_back(g);
      if (!group.published) {
        unpublished_groups.push_back(g);
        continue;
      }
      if (++listed > 4) continue;
      std::vector<std::uint32_t> waiting;
      for (std::uint32_t c = 0; c < consumers.size(); ++c) {
        if (consumers[c].live && !group.signalled[c]) waiting.push_back(c);
      }
      signals += fmt::format("; group {} is not signalled by {}", g, count_noun("worker", waiting));
      if (group.packs != 0) signals += fmt::format(" and read by {} pack(s)", group.packs);
    }
    std::string text;
    if (!unpublished_groups.empty()) {
      text += fmt::format("; the trainer has not published {}", count_noun("group", unpublished_groups));
    }
    text += signals;
    std::string parked;
    std::size_t parked_count = 0;
    for (std::uint32_t c = 0; c < consumers.size(); ++c) {
      for (const LaneState& lane : consumers[c].lanes) {
        for (const Serve& serve : lane.serves) {
          if (serve.state != Serve::State::kParked || ++parked_count > 4) continue;
          parked +=
              fmt::format("{}chunk {} of {}", parked.empty() ? "" : ", ", serve.id.chunk, worker_name(c));
        }
      }
    }
    if (parked_count != 0)
      text += fmt::format("; {} pull(s) parked: {}{}", parked_count, parked, parked_count > 4 ? ", ..." : "");
    for (const auto& [id, ring] : rings) {
      if (ring.kind == LaneKind::kRecovery) break;
      for (const auto& [seq, meeting] : ring.meetings) {
        if (meeting.ticket != 0) continue;
        std::vector<std::uint32_t> absent;
        for (std::uint32_t c = id; c < consumers.size(); c += sharing) {
          if (consumers[c].live && !consumers[c].left &&
              std::find(meeting.arrived.begin(), meeting.arrived.end(), c) == meeting.arrived.end()) {
            absent.push_back(c);
          }
        }
        if (absent.empty()) continue;
        text += fmt::format("; seq {} waits for {} to pull it", seq, count_noun("worker", absent));
        break;
      }
    }
    if (unfreed_groups.empty())
      text += ending ? "; everything is freed" : "; the trainer has not ended the sync";
    text += fmt::format("; {} of {} group(s) unfreed", unfreed_groups.size(), sync_groups());
    return text;
  }

  std::size_t sync_groups() const {
    return static_cast<std::size_t>(
        std::count_if(groups.begin(), groups.end(), [](const Group& group) { return group.in_sync; }));
  }
};

ProducerMachine::ProducerMachine(ProducerConfig config)
    : state_(std::make_unique<State>(std::move(config))) {}
ProducerMachine::~ProducerMachine() = default;

Status ProducerMachine::begin_sync(std::int64_t now_ns, std::uint64_t sync_id, std::uint64_t version,
                                   const std::vector<std::uint32_t>& live,
                                   const std::vector<std::uint32_t>& groups, const NameSet& names,
                                   ProducerActions& out) {
  State& s = *state_;
  if (s.shut) return shutting_down();
  if (sync_id <= s.sync_id) {
    return wrong_state(fmt::format("{}: sync {} is not after sync {}", s.me(), sync_id, s.sync_id));
  }
  if (live.empty()) return bad_argument(fmt::format("sync {}: the live set is empty", sync_id));
  for (std::size_t i = 0; i < live.size(); ++i) {
    if (live[i] >= s.tables.num_consumers) {
      return bad_argument(fmt::format("sync {}: live consumer {} is not within 0..{}", sync_id, live[i],
                                      s.tables.num_consumers - 1));
    }
    if (i > 0 && live[i] <= live[i - 1]) {
      return bad_argument(
          fmt::format("sync {}: the live set is not ascending: {} after {}", sync_id, live[i], live[i - 1]));
    }
  }
  if (Status status = check_name_set(names, s.tables.metadata.size()); !status.ok())
    return status.with_context(fmt::format("sync {}", sync_id));
  const std::vector<bool> visited = listed_groups(names, s.tables);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (groups[i] >= s.groups.size() || s.groups[groups[i]].held.empty()) {
      return bad_argument(fmt::format("sync {}: {} does not own group {}", sync_id, s.me(), groups[i]));
    }
    if (i > 0 && groups[i] <= groups[i - 1]) {
      return bad_argument(
          fmt::format("sync {}: groups are not ascending: {} after {}", sync_id, groups[i], groups[i - 1]));
    }
    if (!visited[groups[i]])
      return bad_argument(fmt::format("sync {}: no name of group {} is listed", sync_id, groups[i]));
  }

  s.fail_sync(
      Status(StatusCode::kAborted, fmt::format("sync {} was superseded by sync {}", s.sync_id, sync_id),
             {.reason = Reason::kSuperseded, .retryable = true}),
      out);

  s.sync_id = sync_id;
  s.version = version;
  s.names = names;
  if (!names.empty() && s.part_names != names) {
    s.parts.clear();
    s.part_names = names;
  }
  s.running = true;
  s.ending = false;
  s.failure = {};
  s.last_progress_ns = now_ns;
  s.live_count = static_cast<std::uint32_t>(live.size());
  for (Consumer& consumer : s.consumers) {
    consumer.live = consumer.left = false;
    consumer.left_sync = {};
    for (LaneState& lane : consumer.lanes) {
      lane.serves.clear();
      lane.running = nullptr;
    }
  }
  std::erase_if(s.parts, [](const auto& part) { return part.second.whole.use_count() == 1; });
  for (auto& [id, ring] : s.rings) {
    ring.meetings.clear();
    ring.live_sharers = 0;
  }
  for (const std::uint32_t c : live) {
    s.consumers[c].live = true;
    for (LaneState& lane : s.consumers[c].lanes) {
      if (const auto ring = s.rings.find(lane.ring); ring != s.rings.end()) ++ring->second.live_sharers;
      s.choose_table(lane);
    }
  }
  for (Group& group : s.groups) {
    group.in_sync = group.published = group.freed = false;
    group.views.clear();
    group.sums.clear();
    group.parked_in_place.clear();
    group.meetings.clear();
    group.packs = 0;
    group.missing = 0;
  }
  for (const std::uint32_t g : groups) {
    s.groups[g].in_sync = true;
    s.groups[g].signalled.assign(s.tables.num_consumers, false);
    s.groups[g].missing = s.live_count;
  }
  s.unpublished = s.unfreed = static_cast<std::uint32_t>(groups.size());

  if (s.early_failure_id != 0 && s.early_failure_id <= sync_id) {
    const Status why = s.early_failure;
    const bool mine = s.early_failure_id == sync_id;
    s.early_failure_id = 0;
    s.early_failure = {};
    if (mine) s.fail_sync(why, out);
  }
  const auto meant = [&](std::uint32_t c) {
    const auto life = s.opened_lives.find(c);
    return s.opened_id != sync_id || life == s.opened_lives.end() || life->second == 0 ||
           life->second == s.consumers[c].incarnation;
  };
  for (const std::uint32_t c : live) {
    if (s.consumers[c].gone || !meant(c)) {
      s.leave_sync(c,
                   peer_error(StatusCode::kUnavailable, worker_name(c), "gone before the sync began",
                              Reason::kPeerLost),
                   out);
    }
  }
  for (std::uint32_t c = 0; c < s.consumers.size(); ++c) {
    Early& early = s.consumers[c].early;
    if (early.size() == 0 || early.sync_id > sync_id) continue;
    const Early kept = std::exchange(early, {});
    if (SHARDPULL_PLANT("begin-forgets-early-signals")) continue;
    if (kept.sync_id < sync_id) {
      s.drops.stale_sync += kept.size();
      continue;
    }
    if (!kept.groups.empty()) {
      signal(now_ns, s.consumers[c].incarnation, sync_id, c, {kept.groups.begin(), kept.groups.end()}, out,
             kept.by_control);
    }
    if (kept.left) s.leave_lanes(c, out);
    for (const PullId& pull : kept.pulls) s.admit(now_ns, pull, out);
  }
  s.settle(out);
  return {};
}

void ProducerMachine::sync_opened(std::uint64_t sync_id, const std::vector<std::uint32_t>& live) {
  State& s = *state_;
  if (sync_id <= s.sync_id || sync_id <= s.opened_id) return;
  s.opened_id = sync_id;
  s.opened_lives.clear();
  for (const std::uint32_t c : live) {
    if (c < s.consumers.size()) s.opened_lives.emplace(c, s.consumers[c].incarnation);
  }
}

Status ProducerMachine::publish_group(std::int64_t now_ns, std::uint32_t g, std::vector<PublishedView> views,
                                      ProducerActions& out) {
  State& s = *state_;
  if (s.shut) return shutting_down();
  if (!s.running) {
    return s.failure.ok() ? wrong_state(fmt::format("{}: group {} published outside a sync", s.me(), g))
                          : s.failure;
  }
  const std::string where = fmt::format("{}: group {}", s.me(), g);
  if (g >= s.groups.size() || !s.groups[g].in_sync) {
    return bad_argument(fmt::format("{} is not owned here or not part of sync {}", where, s.sync_id));
  }
  Group& group = s.groups[g];
  if (group.published) return wrong_state(fmt::format("{} is published twice in sync {}", where, s.sync_id));

  std::sort(views.begin(), views.end(), [](const PublishedView& a, const PublishedView& b) {
    return std::pair(a.name, a.piece) < std::pair(b.name, b.piece);
  });
  const auto label = [&](std::uint32_t name, std::uint32_t piece) {
    const std::string text =
        name < s.tables.metadata.size() ? s.tables.metadata[name].name : fmt::format("name {}", name);
    return piece == 0 ? text : fmt::format("{} piece {}", text, piece - 1);
  };
  std::vector<std::pair<std::uint32_t, std::uint32_t>> wanted = group.held;
  std::erase_if(wanted, [&](const auto& part) { return !listed(s.names, part.first); });
  for (std::size_t i = 0; i < std::max(views.size(), wanted.size()); ++i) {
    if (i < views.size() && (i >= wanted.size() || std::pair(views[i].name, views[i].piece) < wanted[i])) {
      const std::string name = label(views[i].name, views[i].piece);
      if (!listed(s.names, views[i].name)) {
        return bad_argument(fmt::format("{}: '{}' is none of the names of sync {}", where, name, s.sync_id),
                            name);
      }
      return bad_argument(fmt::format("{}: '{}' is not held here in this group, or given twice", where, name),
                          name);
    }
    if (i >= views.size() || wanted[i] < std::pair(views[i].name, views[i].piece)) {
      const std::string name = label(wanted[i].first, wanted[i].second);
      return bad_argument(fmt::format("{}: '{}' is held here but missing", where, name), name);
    }
    const PublishedView& view = views[i];
    const TensorMeta& meta = s.tables.metadata[view.name];
    const std::vector<std::int64_t>& shape =
        view.piece == 0 ? meta.shape : s.tables.ownership.pieces[view.piece - 1].box.size;
    const std::string name = label(view.name, view.piece);
    if (view.dtype != meta.dtype) {
      return bad_argument(fmt::format("{}: '{}' has dtype {}, its metadata says {}", where, name,
                                      dtype_name(view.dtype), dtype_name(meta.dtype)),
                          name);
    }
    if (view.shape != shape) {
      return bad_argument(fmt::format("{}: '{}' has shape [{}], its metadata says [{}]", where, name,
                                      fmt::join(view.shape, ", "), fmt::join(shape, ", ")),
                          name);
    }
    if (!view.location.stride.empty() && view.location.stride.size() != view.shape.size()) {
      return bad_argument(fmt::format("{}: '{}' has {} dims and {} strides", where, name, view.shape.size(),
                                      view.location.stride.size()),
                          name);
    }
    if (!fits(view)) {
      return bad_argument(fmt::format("{}: '{}' does not fit the {} bytes of its window", where, name,
                                      view.location.where.bytes),
                          name);
    }
  }

  group.views = std::move(views);
  group.published = true;
  --s.unpublished;
  s.last_progress_ns = now_ns;
  for (const PullPlace& place : std::exchange(group.parked_in_place, {})) s.serve_in_place(now_ns, place, out);
  const auto meetings = group.meetings;
  for (const auto& [ring, seq] : meetings) s.try_pack(ring, seq, out);
  s.maybe_free(g, out);
  s.settle(out);
  return {};
}

void ProducerMachine::consumer_up(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t incarnation,
                                  ProducerActions& out) {
  State& s = *state_;
  (void)now_ns;
  if (s.shut || consumer >= s.consumers.size()) return;
  s.new_life(consumer, incarnation, out);
  s.settle(out);
}

void ProducerMachine::reserve(std::int64_t now_ns, std::uint32_t consumer, std::uint64_t incarnation,
                              std::uint64_t slot_bytes, std::uint32_t ring_depth, std::uint32_t num_consumers,
                              std::uint32_t workers_per_replica, const Digest128& digest,
                              std::vector<PullDescription> pulls, ProducerActions& out) {
  State& s = *state_;
  (void)now_ns;
  const LaneKind lane = pulls.empty() ? LaneKind::kRegular : pulls.front().lane.kind;
  const auto reply = [&](Status status) {
    out.push_back(ReserveReply{consumer, incarnation, lane, std::move(status)});
  };
  if (s.shut) return reply(shutting_down());
  if (consumer >= s.consumers.size()) {
    return reply(
        peer_error(StatusCode::kInvalidArgument, worker_name(consumer),
                   fmt::format("consumer {} is not within 0..{}", consumer, s.tables.num_consumers - 1),
                   Reason::kSettingMismatch));
  }
  if (Status status = s.check_settings(consumer, ring_depth, num_consumers, workers_per_replica);
      !status.ok()) {
    return reply(std::move(status));
  }
  const Digest128 computed = pulls_digest(pulls, ring_depth);
  if (computed != digest) {
    return reply(peer_error(StatusCode::kDataLoss, worker_name(consumer),
                            fmt::format("{} sent digest {} with pulls whose digest is {}",
                                        worker_name(consumer), to_string(digest), to_string(computed)),
                            Reason::kCorrupt));
  }
  auto table = std::make_shared<PullTable>();
  table->digest = digest;
  table->slot_bytes = slot_bytes;
  if (Status status = s.check_descriptions(consumer, pulls, slot_bytes, *table); !status.ok()) {
    return reply(std::move(status));
  }
  const bool shared = lane == LaneKind::kRegular;
  if (shared) {
    if (Status status = s.check_sharers(consumer, *table); !status.ok()) return reply(std::move(status));
  }

  // Accepted, but for the memory.
  Consumer& state = s.consumers[consumer];
  if (!s.new_life(consumer, incarnation, out)) {
    ++s.drops.stale_incarnation;
    return reply(peer_error(StatusCode::kUnauthenticated, worker_name(consumer),
                            fmt::format("{} was declared lost; it must start anew", worker_name(consumer)),
                            Reason::kBadToken));
  }
  const Status replaced =
      peer_error(StatusCode::kAborted, worker_name(consumer),
                 fmt::format("{} announced its pulls again", worker_name(consumer)), Reason::kSuperseded);
  s.drop_waiting(consumer, lane, replaced, out);
  LaneState& known = state.lane(lane);
  if (known.table && known.table->digest == digest && known.table->slot_bytes >= slot_bytes) {
    reply({});
    return s.settle(out);
  }
  if (known.table && !shared) {
    return reply(peer_error(StatusCode::kFailedPrecondition, worker_name(consumer),
                            fmt::format("{} announced other pulls of its recovery lane before",
                                        worker_name(consumer)),
                            Reason::kSettingMismatch));
  }
  if (known.table && known.table->digest != digest) s.forget_life(consumer, replaced, out);
  s.waiting_rings.insert(known.ring);
  if (!shared) {
    const auto [ring, fresh] = s.rings.try_emplace(known.ring);
    if (fresh) {
      ring->second.kind = lane;
      ring->second.live_sharers = state.live && !state.left ? 1 : 0;
    }
    ring->second.waiting.push_back(
        {consumer, incarnation, lane, lane_slots(pulls, ring_depth), std::move(table)});
    return s.settle(out);
  }
  // Sharers' tables are equal: keep one. (`table` may ask for another slot size; the ring is sized for the
  // largest.)
  for (std::uint32_t c = consumer % s.sharing; c < s.tables.num_consumers; c += s.sharing) {
    const auto& other = s.consumers[c].lane(lane).table;
    if (other && !s.consumers[c].gone && other->slot_bytes == slot_bytes) {
      s.rings.at(known.ring).waiting.push_back({consumer, incarnation, lane, ring_depth, other});
      return s.settle(out);
    }
  }
  s.rings.at(known.ring).waiting.push_back({consumer, incarnation, lane, ring_depth, std::move(table)});
  s.settle(out);
}

void ProducerMachine::ring_allocated(std::int64_t now_ns, std::uint32_t ring_id, const Status& status,
                                     ProducerActions& out) {
  State& s = *state_;
  (void)now_ns;
  const auto found = s.rings.find(ring_id);
  if (found == s.rings.end() || found->second.asked_bytes == 0) return;
  Ring& ring = found->second;
  const std::uint64_t asked = std::exchange(ring.asked_bytes, 0);
  if (status.ok()) {
    ring.slot_bytes = asked;
    ring.depth = ring.asked_depth;
    ring.slots.assign(ring.depth, Slot{});
  } else {
    std::erase_if(ring.waiting, [&](const WaitingReserve& waiting) {
      if (waiting.table->slot_bytes <= ring.slot_bytes && waiting.depth == ring.depth) return false;
      out.push_back(ReserveReply{waiting.consumer, waiting.incarnation, waiting.lane, status});
      return true;
    });
  }
  if (s.shut) return;
  s.try_all_packs(ring_id, out);
  s.settle(out);
}

void ProducerMachine::pull(std::int64_t now_ns, std::uint64_t incarnation, const PullId& pull,
                           ProducerActions& out) {
  State& s = *state_;
  if (s.shut) return State::refuse(incarnation, pull, shutting_down(), out);
  const auto no = [&](StatusCode code, std::string message, Reason reason = Reason::kWrongState) {
    State::refuse(incarnation, pull,
                  peer_error(code, worker_name(pull.consumer),
                             fmt::format("{}: {}", s.me(), std::move(message)), reason),
                  out);
  };
  if (pull.consumer >= s.consumers.size()) {
    return no(StatusCode::kInvalidArgument,
              fmt::format("consumer {} is not within 0..{}", pull.consumer, s.tables.num_consumers - 1));
  }
  Consumer& consumer = s.consumers[pull.consumer];
  if (consumer.incarnation != 0 && incarnation != consumer.incarnation &&
      !SHARDPULL_PLANT("any-life-will-do")) {
    ++s.drops.stale_incarnation;
    return no(StatusCode::kUnauthenticated,
              fmt::format("a pull of another life of {} ({:016x}, not {:016x})", worker_name(pull.consumer),
                          incarnation, consumer.incarnation),
              Reason::kBadToken);
  }
  const LaneState& lane = consumer.lane(pull.lane);
  if (!lane.table) {
    return no(StatusCode::kFailedPrecondition,
              fmt::format("{} has not reserved", worker_name(pull.consumer)));
  }
  if (pull.sync_id < s.sync_id) {
    ++s.drops.stale_sync;
    return;
  }
  if (pull.sync_id > s.sync_id) {
    const std::shared_ptr<const PullDescription> known = lane.table->find(pull.chunk, pull.run);
    // In a sync of some names it comes earlier in its lane.
    if (known == nullptr || (pull.lane == LaneKind::kRegular && pull.seq > known->seq)) {
      return no(StatusCode::kNotFound,
                fmt::format("{} has not announced chunk {} run {} with seq {}", worker_name(pull.consumer),
                            pull.chunk, pull.run, pull.seq));
    }
    Early* const early = s.early_of(pull.consumer, pull.sync_id);
    if (early == nullptr) return;
    ++s.drops.kept_early;
    const auto it = std::find_if(early->pulls.begin(), early->pulls.end(), [&](const PullId& other) {
      return other.chunk == pull.chunk && other.run == pull.run && other.lane == pull.lane;
    });
    if (it != early->pulls.end()) {
      *it = pull;
    } else {
      early->pulls.push_back(pull);
    }
    return;
  }
  s.admit(now_ns, pull, out);
  s.settle(out);
}

void ProducerMachine::pack_done(std::int64_t now_ns, std::uint64_t ticket, const Status& status,
                                std::vector<std::uint64_t> sums, ProducerActions& out) {
  State& s = *state_;
  const auto it = s.packs.find(ticket);
  if (it == s.packs.end()) return;
  const ActivePack pack = it->second;
  s.packs.erase(it);
  const PullDescription& pull = *pack.pull;
  const bool in_place = pack.slot == kNone;
  Slot* const slot = in_place ? nullptr : &s.rings.at(pack.ring).slots[pack.slot];
  if (slot != nullptr) slot->ticket = 0;
  if (status.ok() && !in_place) {
    ++s.packs_done;
    s.bytes_packed += pull.bytes;
  }

  if (!s.running || pack.sync_id != s.sync_id) {  // its sync is over
    if (!s.shut && !in_place) s.try_all_packs(pack.ring, out);
    return s.settle(out);
  }
  Group& group = s.groups[pull.group];
  --group.packs;
  s.last_progress_ns = now_ns;
  Status why = status;
  const std::size_t wanted = summed(s.tables, pull.path) ? pull.keys.size() : 0;
  if (why.ok() && sums.size() != wanted) {
    why = Status(StatusCode::kInternal, fmt::format("{} sums were made, {} are due", sums.size(), wanted));
  }
  if (!why.ok()) {
    why = why.with_context(fmt::format("{}: {} seq {} of group {}", s.me(),
                                       in_place ? "summing" : "packing", pack.seq, pull.group));
    s.fail_sync(why, out);  // every parked pull with it, the sharers' among them
    return s.settle(out);
  }
  if (in_place) {
    group.sums[pack.pull] = {true, std::move(sums)};
    for (const PullPlace& place : std::exchange(group.parked_in_place, {}))
      s.serve_in_place(now_ns, place, out);  // those of other runs are parked again
  } else {
    Ring& ring = s.rings.at(pack.ring);
    const auto meeting = ring.meetings.find(pack.seq);
    std::vector<std::uint32_t> arrived;
    if (meeting != ring.meetings.end()) {
      arrived = std::move(meeting->second.arrived);
      ring.meetings.erase(meeting);
    }
    std::erase(group.meetings, std::pair(pack.ring, pack.seq));
    slot->seq = pack.seq;
    slot->sums = std::move(sums);
    slot->readers = arrived;
    for (const std::uint32_t consumer : arrived) {
      s.answer(now_ns, {consumer, ring.kind, pack.seq}, State::packed_ready(pull, pack.slot, *slot), out);
    }
  }
  s.maybe_free(pull.group, out);
  s.settle(out);
}

void ProducerMachine::signal(std::int64_t now_ns, std::uint64_t incarnation, std::uint64_t sync_id,
                             std::uint32_t consumer, const std::vector<std::uint32_t>& groups,
                             ProducerActions& out, bool by_control) {
  State& s = *state_;
  if (s.shut) return;
  if (consumer >= s.consumers.size()) {
    ++s.drops.not_live;
    return;
  }
  Consumer& state = s.consumers[consumer];
  if (state.incarnation == 0) state.incarnation = incarnation;  // takes nothing here: known by its signals
  if (incarnation != state.incarnation && !SHARDPULL_PLANT("old-lives-are-heard")) {
    ++s.drops.stale_incarnation;
    return;
  }
  if (sync_id < s.sync_id && !SHARDPULL_PLANT("stale-signals-count")) {
    ++s.drops.stale_sync;
    for (const std::uint32_t g : groups) s.stop_reading_group(consumer, sync_id, g);
    return s.settle(out);
  }
  if (sync_id > s.sync_id) {
    Early* const early = s.early_of(consumer, sync_id);
    if (early == nullptr) return;
    early->by_control = early->by_control || by_control;
    for (const std::uint32_t g : groups) {
      if (g >= s.groups.size()) {
        ++s.drops.unknown;
      } else if (early->groups.insert(g).second) {
        ++s.drops.kept_early;
      } else {
        ++s.drops.duplicate_signals;
      }
    }
    return;
  }
  if (!state.live) {
    ++s.drops.not_live;
    for (const std::uint32_t g : groups) s.stop_reading_group(consumer, sync_id, g);
    return s.settle(out);
  }
  s.apply_signals(now_ns, consumer, groups, by_control, out);
  s.settle(out);
}

void ProducerMachine::leave_lanes(std::int64_t now_ns, std::uint64_t incarnation, std::uint64_t sync_id,
                                  std::uint32_t consumer, ProducerActions& out) {
  State& s = *state_;
  (void)now_ns;
  if (s.shut || consumer >= s.consumers.size()) return;
  Consumer& state = s.consumers[consumer];
  if (incarnation != state.incarnation) {
    ++s.drops.stale_incarnation;
  } else if (sync_id == s.sync_id) {
    s.leave_lanes(consumer, out);
  } else if (Early* early = s.early_of(consumer, sync_id)) {
    early->left = true;
  }
  s.settle(out);
}

void ProducerMachine::consumer_lost(std::int64_t now_ns, std::uint32_t consumer, const Status& why,
                                    ProducerActions& out) {
  State& s = *state_;
  (void)now_ns;
  if (s.shut || consumer >= s.consumers.size()) return;
  s.consumers[consumer].gone = true;
  s.forget_life(consumer, why, out);
  s.settle(out);
}

Status ProducerMachine::end_sync(std::int64_t now_ns, ProducerActions& out) {
  State& s = *state_;
  (void)now_ns;
  if (s.shut) return shutting_down();
  if (!s.running)
    return s.failure.ok() ? wrong_state(fmt::format("{}: end_sync without a sync", s.me())) : s.failure;
  if (s.unpublished != 0) {
    std::vector<std::uint32_t> missing;
    for (std::uint32_t g = 0; g < s.groups.size(); ++g) {
      if (s.groups[g].in_sync && !s.groups[g].published) missing.push_back(g);
    }
    return wrong_state(
        fmt::format("{}: end_sync before {} was published", s.me(), count_noun("group", missing)));
  }
  s.ending = true;
  s.settle(out);
  return {};
}

void ProducerMachine::fail(std::uint64_t sync_id, const Status& cause, ProducerActions& out) {
  State& s = *state_;
  if (s.shut) return;
  // In a reply kShutdown says that this process ends (ConsumerMachine::pull_failed). What fails a sync may have
  // that reason of its own: a source's error, or that of whoever interrupts the caller.
  ErrorInfo info = cause.info();
  if (info.reason == Reason::kShutdown) info.reason = Reason::kUnspecified;
  const Status why(cause.code(), cause.message(), std::move(info));
  if (sync_id == s.sync_id) {
    s.fail_sync(why, out);
    return s.settle(out);
  }
  if (sync_id > s.sync_id && sync_id > s.early_failure_id) {
    s.early_failure_id = sync_id;
    s.early_failure = why;
  }
}

void ProducerMachine::tick(std::int64_t now_ns, ProducerActions& out) {
  State& s = *state_;
  for (auto& [sync, since_ns] : s.unquiet) {
    if (!since_ns) since_ns = now_ns;
    if (now_ns - *since_ns >= s.config.drain_timeout_ns) s.mapped_reads.erase(sync);
  }
  s.settle(out);
  if (!s.running || now_ns - s.last_progress_ns < s.config.stall_timeout_ns) return;
  s.fail_sync(stalled(fmt::format("{}: sync {} made no progress for {:.3g} s{}", s.me(), s.sync_id,
                                  static_cast<double>(now_ns - s.last_progress_ns) / 1e9, s.waited_for())),
              out);
  s.settle(out);
}

void ProducerMachine::shutdown(ProducerActions& out) {
  State& s = *state_;
  if (s.shut) return;
  s.mapped_reads.clear();  // a fleet that ends does not wait for its readers
  s.fail_sync(shutting_down(), out);
  s.settle_quiet(out);
  for (auto& [id, ring] : s.rings) {
    for (const WaitingReserve& waiting : std::exchange(ring.waiting, {})) {
      out.push_back(ReserveReply{waiting.consumer, waiting.incarnation, waiting.lane, shutting_down()});
    }
  }
  for (Consumer& consumer : s.consumers) {
    for (const PullId& pull : consumer.early.pulls)
      State::refuse(consumer.incarnation, pull, shutting_down(), out);
    consumer.early = {};
  }
  s.shut = true;
}

bool ProducerMachine::syncing() const {
  return state_->running;
}
std::optional<std::uint64_t> ProducerMachine::running_sync() const {
  return state_->running ? std::optional(state_->sync_id) : std::nullopt;
}
const Status& ProducerMachine::failure() const {
  return state_->failure;
}
std::vector<std::uint32_t> ProducerMachine::unfreed() const {
  std::vector<std::uint32_t> out;
  if (!state_->running) return out;
  for (std::uint32_t g = 0; g < state_->groups.size(); ++g) {
    const Group& group = state_->groups[g];
    if (group.in_sync && group.published && !group.freed) out.push_back(g);
  }
  return out;
}
std::vector<std::uint32_t> ProducerMachine::live() const {
  std::vector<std::uint32_t> out;
  for (std::uint32_t c = 0; c < state_->consumers.size(); ++c) {
    if (state_->consumers[c].live) out.push_back(c);
  }
  return out;
}
const DropCounters& ProducerMachine::drops() const {
  return state_->drops;
}
std::uint64_t ProducerMachine::packs() const {
  return state_->packs_done;
}
std::uint64_t ProducerMachine::bytes_packed() const {
  return state_->bytes_packed;
}

}  // namespace shardpull
