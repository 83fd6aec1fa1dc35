#include "protocol/protocol_testing.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include <fmt/format.h>

#include "plan/integrity.h"

namespace shardpull::protocol_testing {
namespace {

template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "unexpected: %s\n", result.status().to_string().c_str());
    std::abort();
  }
  return std::move(result).value();
}

ProducerConfig producer_config(const TinyModel& model, std::uint32_t rank, bool fail_on_consumer_loss) {
  ProducerConfig config;
  config.rank = rank;
  config.tables = model.tables;
  config.fail_on_consumer_loss = fail_on_consumer_loss;
  return config;
}

ConsumerConfig consumer_config(std::shared_ptr<const WorkerPlan> plan, std::uint32_t num_modules,
                               std::int64_t stall_timeout_ns, std::set<Path> summed, bool staged) {
  ConsumerConfig config;
  config.staged = staged;
  config.plan = std::move(plan);
  config.summed = std::move(summed);
  config.num_modules = num_modules;
  config.stall_timeout_ns = stall_timeout_ns;
  return config;
}

}  // namespace

TinyModel tiny_model(const TinyOptions& options) {
  auto tables = std::make_shared<InitTables>();
  for (std::uint32_t r = 0; r < options.producers; ++r) tables->producers.push_back(fmt::format("sim:{}", r));
  for (std::uint32_t g = 0; g < options.groups; ++g) {
    for (std::uint32_t n = 0; n < options.names_per_group; ++n) {
      tables->metadata.push_back({fmt::format("layers.{}.w{}", g, n), DType::kF32, {4, 4}});
    }
    tables->group_lens.push_back(options.names_per_group);
  }
  if (options.pipeline_stages) {
    for (std::uint32_t r = 0; r < std::min(options.producers, options.groups); ++r)
      tables->ownership.owner_sets.push_back({r});
    for (std::uint32_t name = 0; name < tables->metadata.size(); ++name) {
      tables->ownership.name_owner_class.push_back(
          static_cast<std::int32_t>(name / options.names_per_group % options.producers));
    }
  }
  tables->producer_mappable.assign(options.producers, 1);
  tables->producer_resident.assign(options.producers, 0);
  tables->num_consumers = options.consumers;
  tables->num_replicas = options.replicas;
  tables->ring_depth = options.ring_depth;
  tables->transport = options.transport;
  tables->integrity = options.integrity;
  if (const Status status = validate(*tables); !status.ok()) {
    std::fprintf(stderr, "unexpected: %s\n", status.to_string().c_str());
    std::abort();
  }

  TinyModel model;
  for (std::uint32_t name = 0; name < tables->metadata.size(); ++name) {
    const std::uint32_t module = options.modules_span_groups ? 0
                                 : options.module_per_name   ? name
                                                             : name / options.names_per_group;
    if (module == model.recording.modules.size()) {
      model.recording.modules.push_back({fmt::format("module{}", module), "Tiny", true, true});
    }
    model.recording.parameters.push_back({module, fmt::format("p{}", name), DType::kF32, {4, 4}, {4, 1}});
    Scatter scatter;
    scatter.name = name;
    scatter.slice = Slice::whole(16);
    scatter.shape = {4, 4};
    scatter.destination = {name, DType::kF32, 0, {4, 4}, {4, 1}};
    model.recording.scatters.push_back(std::move(scatter));
    model.recording.live.push_back(name);
  }
  model.options.max_chunk_bytes = options.max_chunk_bytes;
  model.options.pull_split = options.pull_split;
  model.options.path = options.path == Path::kPacked   ? PathPolicy::kPacked
                       : options.path == Path::kMapped ? PathPolicy::kMapped
                                                       : PathPolicy::kDirect;
  model.tables = std::move(tables);
  return model;
}

std::shared_ptr<const WorkerPlan> TinyModel::plan(std::uint32_t consumer) const {
  return std::make_shared<const WorkerPlan>(must(plan_worker(*tables, recording, consumer, options)));
}

NameSet some_names(const TinyModel& model, const std::vector<std::uint32_t>& names) {
  NameSet set((model.tables->metadata.size() + 7) / 8, 0);
  for (const std::uint32_t name : names) set[name / 8] |= static_cast<std::uint8_t>(1u << (name % 8));
  return set;
}

std::shared_ptr<const WorkerPlan> part_of(const TinyModel& model, const WorkerPlan& plan,
                                          const NameSet& names) {
  return std::make_shared<const WorkerPlan>(must(restrict_plan(plan, model.recording, *model.tables, names)));
}

std::vector<std::uint64_t> sums_of(std::uint32_t chunk, std::uint32_t run, std::size_t keys) {
  std::vector<std::uint64_t> sums;
  for (std::size_t k = 0; k < keys; ++k) sums.push_back((std::uint64_t{chunk} << 32 | run << 16) + k + 1);
  return sums;
}

// ---- producer -----------------------------------------------------------------------------------

ProducerBench::ProducerBench(const TinyOptions& options, std::uint32_t rank_given, bool fail_on_consumer_loss)
    : model(tiny_model(options)),
      rank(rank_given),
      machine(producer_config(model, rank_given, fail_on_consumer_loss)) {
  for (std::uint32_t c = 0; c < options.consumers; ++c) {
    plans.push_back(model.plan(c));
    pulls.push_back(pulls_at(*plans.back(), rank));
  }
}

void ProducerBench::reserve(std::uint32_t consumer, bool answer) {
  const InitTables& t = *model.tables;
  std::uint64_t bytes = 0;
  for (const PullDescription& pull : pulls[consumer]) {
    if (pull.path == Path::kPacked) bytes = std::max(bytes, pull.bytes);
  }
  machine.reserve(now, consumer, life(consumer), bytes, t.ring_depth, t.num_consumers,
                  effective_workers_per_replica(t), pulls_digest(pulls[consumer], t.ring_depth),
                  pulls[consumer], out);
  if (!answer) return;
  for (const auto& ring : all<producer_action::AllocateRing>())
    machine.ring_allocated(now, ring.sharing_group, {}, out);
}

void ProducerBench::reserve_all() {
  for (std::uint32_t c = 0; c < plans.size(); ++c) reserve(c);
  for (const auto& reply : all<producer_action::ReserveReply>())
    EXPECT_TRUE(reply.status.ok()) << reply.status.to_string();
  take();
}

Status ProducerBench::begin(std::uint64_t sync, std::vector<std::uint32_t> live) {
  if (live.empty()) {
    for (std::uint32_t c = 0; c < plans.size(); ++c) live.push_back(c);
  }
  std::vector<std::uint32_t> owned;
  const auto owners = group_owners(*model.tables);
  const auto groups = listed_groups(names, *model.tables);
  for (std::uint32_t g = 0; g < owners.size(); ++g) {
    if (groups[g] && std::binary_search(owners[g].begin(), owners[g].end(), rank)) owned.push_back(g);
  }
  sync_id = sync;
  return machine.begin_sync(now, sync, sync * 10, live, owned, names, out);
}

std::vector<PublishedView> ProducerBench::views(std::uint32_t group) const {
  std::vector<PublishedView> found;
  const auto group_of = group_of_names(*model.tables);
  for (std::uint32_t name = 0; name < group_of.size(); ++name) {
    if (group_of[name] != group || !listed(names, name)) continue;
    PublishedView view;
    view.name = name;
    view.dtype = DType::kF32;
    view.shape = {4, 4};
    view.location.where = {name + 1, 1, 0, 64};
    found.push_back(std::move(view));
  }
  return found;
}

Status ProducerBench::publish(std::uint32_t group) {
  return machine.publish_group(now, group, views(group), out);
}

PullId ProducerBench::pull_id(std::uint32_t consumer, std::uint32_t seq) const {
  const PullDescription pull = restrict_pulls(pulls[consumer], names).at(seq);
  return {sync_id, consumer, pull.chunk_id, static_cast<std::uint16_t>(pull.run), 0, seq};
}

void ProducerBench::pull(std::uint32_t consumer, std::uint32_t seq) {
  machine.pull(now, life(consumer), pull_id(consumer, seq), out);
}

void ProducerBench::finish_packs(const Status& status) {
  const auto end = [&](std::uint64_t ticket, const PullDescription& pull, bool summed) {
    std::vector<std::uint64_t> sums;
    if (summed && status.ok()) sums = sums_of(pull.chunk_id, pull.run, pull.keys.size());
    machine.pack_done(now, ticket, status, std::move(sums), out);
  };
  const ProducerActions started = out;
  for (const ProducerAction& action : started) {
    if (const auto* pack = std::get_if<producer_action::Pack>(&action))
      end(pack->ticket, *pack->pull, pack->summed);
    if (const auto* sum = std::get_if<producer_action::Sum>(&action)) end(sum->ticket, *sum->pull, true);
  }
}

void ProducerBench::signal(std::uint32_t consumer, std::vector<std::uint32_t> groups) {
  machine.signal(now, life(consumer), sync_id, consumer, groups, out);
}

void ProducerBench::serve(std::uint32_t consumer, std::uint32_t seq) {
  pull(consumer, seq);
  finish_packs();
}

std::string ProducerBench::refusal() const {
  const auto replies = all<producer_action::FailReply>();
  EXPECT_EQ(replies.size(), 1u);
  return replies.empty() ? "" : replies.back().status.message();
}

// ---- consumer -----------------------------------------------------------------------------------

ConsumerBench::ConsumerBench(const TinyOptions& options, std::uint32_t consumer, bool staged)
    : ConsumerBench(tiny_model(options).plan(consumer), options.modules_span_groups ? 1 : options.groups,
                    300 * kSecond, summed_paths(*tiny_model(options).tables), staged) {}

ConsumerBench::ConsumerBench(std::shared_ptr<const WorkerPlan> given, std::uint32_t num_modules,
                             std::int64_t stall_timeout_ns, std::set<Path> sums, bool staged)
    : plan(std::move(given)),
      summed(std::move(sums)),
      machine(consumer_config(plan, num_modules, stall_timeout_ns, summed, staged)) {}

void ConsumerBench::start(std::uint64_t sync, std::uint64_t version) {
  EXPECT_EQ(machine.start_update(now, sync, version, part, out), Status());
  EXPECT_EQ(machine.update(now, out), Status());
}

const Chunk& ConsumerBench::chunk_of(std::uint32_t chunk_id) const {
  const auto& chunks = (part ? part : plan)->chunks;
  return *std::find_if(chunks.begin(), chunks.end(), [&](const Chunk& c) { return c.chunk_id == chunk_id; });
}

ReadyInfo ConsumerBench::ready_info(std::uint32_t chunk, std::uint16_t run) const {
  const Chunk& c = chunk_of(chunk);
  ReadyInfo info;
  info.path = c.path;
  info.bytes = c.runs[run].bytes;
  if (c.path != Path::kPacked) {
    std::set<std::pair<std::uint32_t, std::uint32_t>> distinct;
    for (std::uint32_t k = 0; k < c.runs[run].key_count; ++k) {
      distinct.emplace(c.keys[c.runs[run].first_key + k].name, c.keys[c.runs[run].first_key + k].piece);
    }
    info.entries.resize(distinct.size());
  }
  if (summed.contains(c.path)) info.sums = sums_of(chunk, run, c.runs[run].key_count);
  return info;
}

PullId ConsumerBench::pull_id(std::uint32_t chunk, std::uint16_t run) const {
  return {machine.sync_id(), plan->consumer, chunk, run, 0, chunk_of(chunk).runs[run].seq};
}

void ConsumerBench::ready(std::uint32_t chunk, std::uint16_t run) {
  machine.ready(now, chunk_of(chunk).runs[run].producer, pull_id(chunk, run), ready_info(chunk, run), out);
}
void ConsumerBench::answer(const consumer_action::SendPull& pull) {
  machine.ready(now, pull.producer, pull.pull, ready_info(pull.pull.chunk, pull.pull.run), out);
}
void ConsumerBench::land(std::uint32_t chunk, std::uint16_t run, const Status& status) {
  machine.transfer_done(now, machine.sync_id(), chunk, run, status, out);
}
void ConsumerBench::scattered(std::uint32_t chunk, const Status& status) {
  machine.scatter_done(now, machine.sync_id(), chunk, status, out);
}
void ConsumerBench::posted(std::uint32_t chunk, const Status& status) {
  machine.post_done(now, machine.sync_id(), chunk, status, out);
}

void ConsumerBench::copied(const Status& status) {
  machine.commit_done(now, machine.sync_id(), status, out);
}

void ConsumerBench::ack_all() {
  for (const auto& signals : all<consumer_action::SendSignals>()) {
    if (signals.sync_id == machine.sync_id())
      machine.signals_acked(now, signals.producer, signals.sync_id, signals.groups, out);
  }
}

void ConsumerBench::run_to_end(std::int64_t step_ns) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const ConsumerAction action = out[i];
    if (step_ns > 0) {
      now += step_ns;
      machine.tick(now, out);
    }
    if (const auto* pull = std::get_if<consumer_action::SendPull>(&action)) {
      answer(*pull);
    } else if (const auto* announce = std::get_if<consumer_action::AnnounceRecovery>(&action)) {
      machine.recovery_reserved(now, announce->producer, {}, out);
    } else if (const auto* transfer = std::get_if<consumer_action::StartTransfer>(&action)) {
      land(transfer->chunk, transfer->run);
    } else if (const auto* scatter = std::get_if<consumer_action::StartScatter>(&action)) {
      scattered(scatter->chunk);
    } else if (const auto* copy = std::get_if<consumer_action::StartCopy>(&action)) {
      scattered(copy->chunk);
    } else if (const auto* post = std::get_if<consumer_action::StartPost>(&action)) {
      posted(post->chunk);
    } else if (std::holds_alternative<consumer_action::StartCommit>(action)) {
      copied();
    } else if (const auto* signals = std::get_if<consumer_action::SendSignals>(&action)) {
      machine.signals_acked(now, signals->producer, signals->sync_id, signals->groups, out);
    }
  }
}

namespace {
template <typename T>
std::vector<std::uint32_t> chunks_of(const std::vector<T>& actions) {
  std::vector<std::uint32_t> chunks;
  for (const T& action : actions) chunks.push_back(action.chunk);
  return chunks;
}
}  // namespace

std::vector<std::uint32_t> ConsumerBench::pulled() const {
  std::vector<std::uint32_t> chunks;
  for (const auto& pull : all<consumer_action::SendPull>()) chunks.push_back(pull.pull.chunk);
  return chunks;
}
std::vector<std::uint32_t> ConsumerBench::transferring() const {
  return chunks_of(all<consumer_action::StartTransfer>());
}
std::vector<std::uint32_t> ConsumerBench::scattering() const {
  auto chunks = chunks_of(all<consumer_action::StartScatter>());
  for (const auto& copy : all<consumer_action::StartCopy>()) chunks.push_back(copy.chunk);
  return chunks;
}
std::vector<std::uint32_t> ConsumerBench::posting() const {
  return chunks_of(all<consumer_action::StartPost>());
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> ConsumerBench::signalled() const {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> found;
  for (const auto& signals : all<consumer_action::SendSignals>()) {
    for (const std::uint32_t group : signals.groups) found.emplace_back(signals.producer, group);
  }
  return found;
}

Status ConsumerBench::update_result() const {
  const auto done = all<consumer_action::UpdateDone>();
  EXPECT_FALSE(done.empty()) << "update() is not over";
  return done.empty() ? Status(StatusCode::kUnknown, "not over") : done.back().status;
}
Status ConsumerBench::finish_result() const {
  const auto done = all<consumer_action::FinishDone>();
  EXPECT_FALSE(done.empty()) << "finish_update() is not over";
  return done.empty() ? Status(StatusCode::kUnknown, "not over") : done.back().status;
}

}  // namespace shardpull::protocol_testing
