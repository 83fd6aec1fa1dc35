// Building blocks of this room's tests: a tiny model, its plans, and drivers that feed one machine and read
// its actions.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "plan/plan.h"
#include "plan/restrict.h"
#include "protocol/consumer_machine.h"
#include "protocol/producer_machine.h"
#include "protocol/trainer_machine.h"

namespace shardpull::protocol_testing {

inline constexpr std::int64_t kSecond = 1'000'000'000;

struct TinyOptions {
  std::uint32_t groups = 3;           // layers, one gather group each
  std::uint32_t names_per_group = 1;  // [4, 4] F32 each, 64 bytes
  std::uint32_t producers = 1;
  std::uint32_t consumers = 1;
  std::uint32_t replicas = 1;
  std::uint32_t ring_depth = 2;
  bool pipeline_stages =
      false;  // layer g is held by rank g mod producers only, else everybody holds everything
  bool modules_span_groups = false;  // one module takes a name of every group, else one module per group
  bool module_per_name = false;      // else
  Path path = Path::kPacked;
  std::uint64_t max_chunk_bytes = 64;  // one name a chunk
  std::uint32_t pull_split = 1;
  TransportKind transport = TransportKind::kShm;
  Integrity integrity = Integrity::kWire;
};

// Tables and a recording in which every worker takes every name whole.
struct TinyModel {
  std::shared_ptr<const InitTables> tables;
  Recording recording;
  PlanOptions options;

  std::shared_ptr<const WorkerPlan> plan(std::uint32_t consumer) const;
};
TinyModel tiny_model(const TinyOptions& options = {});
// The set of these names of the model.
NameSet some_names(const TinyModel& model, const std::vector<std::uint32_t>& names);
// What of a worker's plan a sync of these names runs.
std::shared_ptr<const WorkerPlan> part_of(const TinyModel& model, const WorkerPlan& plan,
                                          const NameSet& names);

// The actions of kind T among `actions`, in order.
template <typename T, typename Action>
std::vector<T> of_kind(const std::vector<Action>& actions) {
  std::vector<T> found;
  for (const Action& action : actions) {
    if (const T* one = std::get_if<T>(&action)) found.push_back(*one);
  }
  return found;
}

// Made-up sums of a run's keys: no two alike.
std::vector<std::uint64_t> sums_of(std::uint32_t chunk, std::uint32_t run, std::size_t keys);

// One ProducerMachine and what it answered since the last clear().
struct ProducerBench {
  explicit ProducerBench(const TinyOptions& options = {}, std::uint32_t rank = 0,
                         bool fail_on_consumer_loss = false);

  static std::uint64_t life(std::uint32_t consumer) { return 100 + consumer; }
  // Reserves consumer's pulls; ring allocations are answered with OK unless `answer` is false.
  void reserve(std::uint32_t consumer, bool answer = true);
  void reserve_all();
  Status begin(std::uint64_t sync_id,
               std::vector<std::uint32_t> live = {});  // empty: everybody; all owned groups of `names`
  std::vector<PublishedView> views(std::uint32_t group) const;  // of `names`
  Status publish(std::uint32_t group);
  PullId pull_id(std::uint32_t consumer, std::uint32_t seq) const;  // of the sync begun last
  void pull(std::uint32_t consumer, std::uint32_t seq);
  // Ends every pack and sum among the actions not taken yet, in order of start, with sums_of() where they are due.
  void finish_packs(const Status& status = {});
  void signal(std::uint32_t consumer, std::vector<std::uint32_t> groups);
  // Pulls and ends the pack.
  void serve(std::uint32_t consumer, std::uint32_t seq);

  // Takes the actions so far.
  ProducerActions take() { return std::exchange(out, {}); }
  template <typename T>
  std::vector<T> all() const {
    return of_kind<T>(out);
  }
  template <typename T>
  std::size_t count() const {
    return all<T>().size();
  }
  // The message of the only FailReply; a failed expectation otherwise.
  std::string refusal() const;

  TinyModel model;
  std::vector<std::shared_ptr<const WorkerPlan>> plans;
  std::vector<std::vector<PullDescription>> pulls;  // by consumer, at this rank
  std::uint32_t rank;
  ProducerMachine machine;
  NameSet names;  // of the syncs to begin
  std::uint64_t sync_id = 0;
  std::int64_t now = 0;
  ProducerActions out;
};

// One ConsumerMachine and what it asked for since the last take().
struct ConsumerBench {
  explicit ConsumerBench(const TinyOptions& options = {}, std::uint32_t consumer = 0, bool staged = false);
  // For hand-made plans.
  ConsumerBench(std::shared_ptr<const WorkerPlan> plan, std::uint32_t num_modules,
                std::int64_t stall_timeout_ns = 300 * kSecond, std::set<Path> summed = {},
                bool staged = false);

  // start_update, with `part`, and update, both expected to be legal.
  void start(std::uint64_t sync, std::uint64_t version);
  void ready(std::uint32_t chunk, std::uint16_t run = 0);  // from the producer of the plan
  void answer(const consumer_action::SendPull& pull);      // with Ready
  void land(std::uint32_t chunk, std::uint16_t run = 0, const Status& status = {});
  void scattered(std::uint32_t chunk, const Status& status = {});
  void posted(std::uint32_t chunk, const Status& status = {});
  void copied(const Status& status = {});  // commit_done
  void ack_all();  // confirms every signal asked for so far
  // Answers everything asked for, until nothing is left to answer. Before each answer `step_ns` pass, at the
  // end of which the machine ticks.
  void run_to_end(std::int64_t step_ns = 0);

  ConsumerActions take() { return std::exchange(out, {}); }
  template <typename T>
  std::vector<T> all() const {
    return of_kind<T>(out);
  }
  template <typename T>
  std::size_t count() const {
    return all<T>().size();
  }
  std::vector<std::uint32_t> pulled() const;  // chunks
  std::vector<std::uint32_t> transferring() const;
  std::vector<std::uint32_t> scattering() const;  // StartScatter and StartCopy
  std::vector<std::uint32_t> posting() const;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> signalled() const;  // (producer, group)
  // The status of the last UpdateDone; a failed expectation without one.
  Status update_result() const;
  Status finish_result() const;
  const Chunk& chunk_of(std::uint32_t chunk_id) const;  // of the sync's plan
  ReadyInfo ready_info(std::uint32_t chunk, std::uint16_t run = 0) const;
  PullId pull_id(std::uint32_t chunk, std::uint16_t run = 0) const;

  std::shared_ptr<const WorkerPlan> plan;
  std::shared_ptr<const WorkerPlan> part;  // what the syncs to start run; null: all of it
  std::set<Path> summed;
  ConsumerMachine machine;
  std::int64_t now = 0;
  ConsumerActions out;
};

}  // namespace shardpull::protocol_testing
