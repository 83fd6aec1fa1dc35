// The simulated world: one clock, one thread, one seeded source of chance, the networks, and what is written
// down about a run.
//
// Everything that takes time is an event at a later instant of the clock; events of one instant run in the
// order they were made. The same seed gives the same run, event by event: the trace hash says so.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/clock.h"
#include "base/random.h"
#include "control/sim/sim_control.h"
#include "transport/sim/sim_transport.h"

namespace shardpull::sim {

// Where a sync can be made to fail. The last two flip one bit, of a packed key in its serve slot before
// anybody reads it, or of a key that a worker has just read or copied out of a mapping.
enum class Failure : std::uint8_t { kSource, kPack, kTransfer, kScatter, kHook, kSlotBit, kArrivedBit };
inline constexpr std::uint8_t kFailures = 5;  // that need no checksum to be found

// Confined to one thread.
class World {
 public:
  explicit World(std::uint64_t seed);
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::int64_t now_ns() const { return clock_.now_ns(); }
  Random& random() { return random_; }
  SimNet& net() { return net_; }
  SimControlNet& control() { return control_; }

  // Runs `step` at a random instant within (0, max_delay_ns] from now.
  void later(std::int64_t max_delay_ns, std::function<void()> step);
  // Runs `step` at now + delay_ns.
  void after(std::int64_t delay_ns, std::function<void()> step);
  // Work that takes time and may be interleaved with everything else: step(0), ... step(count - 1) at growing
  // instants, then done().
  void in_pieces(std::size_t count, std::int64_t max_piece_ns, std::function<void(std::size_t)> step,
                 std::function<void()> done);

  // A transport whose progress is part of the world until it is removed. Both must live as long.
  void add_transport(Transport& transport, TransportSink& sink) {
    transports_.emplace_back(&transport, &sink);
  }
  void remove_transport(const Transport& transport) {
    std::erase_if(transports_, [&](const auto& one) { return one.first == &transport; });
  }

  // Runs events until `over()` is true, a rule was broken, or `limit_ns` of simulated time have passed (a
  // broken rule: liveness; `what` says what was waited for). True when over() came true.
  bool run_until(const std::function<bool()>& over, std::int64_t limit_ns, std::string_view what);

  // Writes a step of the run into the trace hash, and into the trace where one is kept.
  template <typename... Numbers>
  void trace(std::string_view what, Numbers... numbers) {
    mix(static_cast<std::uint64_t>(now_ns()));
    for (const char c : what) mix(static_cast<std::uint64_t>(c));
    (mix(static_cast<std::uint64_t>(numbers)), ...);
    if (tracing_) trace_ += line(what, {static_cast<std::int64_t>(numbers)...});
    ++steps_;
    if (!at_step_.empty() && at_step_.begin()->first <= steps_) start_due_steps();
  }
  std::uint64_t trace_hash() const { return hash_; }
  std::uint64_t events() const { return events_run_; }
  void keep_trace() { tracing_ = true; }
  std::string take_trace() { return std::move(trace_); }  // one line a step

  // Traced steps so far, and what is to happen when there have been so many: soon after, between two events.
  std::uint64_t steps() const { return steps_; }
  void at_step(std::uint64_t step, std::function<void()> what) { at_step_.emplace(step, std::move(what)); }
  // Forgets what has not happened yet.
  void clear_steps() { at_step_.clear(); }

  // How likely a message that the protocol takes twice is sent twice: the second some time after the first.
  void repeat_messages(double probability) { repeating_ = probability; }
  template <typename Send>
  void maybe_again(Send send) {
    if (repeating_ == 0 || !random_.chance(repeating_)) return;
    ++repeated_;
    later(random_.chance(0.2) ? kNanosPerSecond / 2 : 20 * kNanosPerMilli, std::move(send));
  }
  std::uint64_t repeated() const { return repeated_; }

  // Makes one step of a kind fail: the one after `spared` others. One failure is armed at a time.
  void arm(Failure kind, std::uint64_t spared);
  void disarm() { armed_ = false; }
  bool armed() const { return armed_; }
  // The status of a step of this kind: an error when it is the one to fail. Its message names the kind.
  Status outcome_of(Failure kind);
  // Flips a random bit of `bytes` when this step, of one of the two kinds that do so, is the one to fail.
  void maybe_flip(Failure kind, std::span<std::byte> bytes);
  bool struck() const { return struck_; }  // since the last arm()

  // Workers whose replica has lost somebody: what they still do of their sync counts no more, and the memory
  // that they read it from may be gone.
  void disown(std::uint32_t worker) { disowned_.insert(worker); }
  void own(std::uint32_t worker) { disowned_.erase(worker); }
  bool disowned(std::uint32_t worker) const { return disowned_.contains(worker); }

  // A rule of the system was broken. The run ends at the first one.
  template <typename... Args>
  void broken(fmt::format_string<Args...> format, Args&&... args) {
    note_broken(fmt::format(format, std::forward<Args>(args)...));
  }
  const std::vector<std::string>& violations() const { return violations_; }

 private:
  void mix(std::uint64_t value) { hash_ = splitmix64(hash_ ^ value); }
  std::string line(std::string_view what, std::initializer_list<std::int64_t> numbers) const;
  void start_due_steps();
  void note_broken(std::string what);
  bool step(std::int64_t deadline_ns);
  bool strikes(Failure kind);

  FakeClock clock_;
  Random random_;
  SimNet net_;
  SimControlNet control_;
  std::vector<std::pair<Transport*, TransportSink*>> transports_;
  std::map<std::pair<std::int64_t, std::uint64_t>, std::function<void()>> events_;
  std::uint64_t next_order_ = 0;
  std::uint64_t events_run_ = 0;
  std::uint64_t hash_ = 0;
  std::uint64_t steps_ = 0;
  std::multimap<std::uint64_t, std::function<void()>> at_step_;
  bool tracing_ = false;
  std::string trace_;
  double repeating_ = 0;
  std::uint64_t repeated_ = 0;
  bool armed_ = false, struck_ = false;
  Failure kind_ = Failure::kSource;
  std::uint64_t spared_ = 0;
  std::set<std::uint32_t> disowned_;
  std::vector<std::string> violations_;
};

// A process of the world. What it has under way stops when it does; the object stays until the run is over.
class Process {
 public:
  bool down() const { return down_; }
  // Everything that it does itself takes so many times as long from now on.
  void slow_down(std::int64_t factor) { slow_ = factor; }

 protected:
  explicit Process(World& world) : world_(world) {}
  ~Process() = default;

  void later(std::int64_t max_delay_ns, std::function<void()> step) {
    world_.later(max_delay_ns * slow_, while_up(std::move(step)));
  }
  void after(std::int64_t delay_ns, std::function<void()> step) {
    world_.after(delay_ns, while_up(std::move(step)));
  }
  void in_pieces(std::size_t count, std::int64_t max_piece_ns, std::function<void(std::size_t)> step,
                 std::function<void()> done) {
    world_.in_pieces(
        count, max_piece_ns * slow_,
        [this, step = std::move(step)](std::size_t i) {
          if (!down_) step(i);
        },
        while_up(std::move(done)));
  }

  World& world_;
  bool down_ = false;

 private:
  std::function<void()> while_up(std::function<void()> step) {
    return [this, step = std::move(step)] {
      if (!down_) step();
    };
  }
  std::int64_t slow_ = 1;
};

}  // namespace shardpull::sim
