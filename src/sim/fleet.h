// A simulated fleet: its processes, what happens to them, and the rules that hold between them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sim/faults.h"
#include "sim/sim_model.h"
#include "sim/sim_trainer.h"
#include "sim/sim_worker.h"
#include "sim/simulate.h"
#include "sim/world.h"

namespace shardpull::sim {

// Every rule that is broken is told to the world.
class Fleet {
 public:
  Fleet(World& world, const SimModel& model, std::uint64_t seed);

  // Everybody joins. False: a rule was broken.
  bool start();
  // One sync and what it leads to. `allowed`: how many of the workers may take part. `last`: without faults,
  // with everybody who can be there, and exact. False: a rule was broken.
  bool sync(std::uint64_t sync_id, std::uint64_t version, std::uint32_t allowed, const NameSet& names,
            bool last);
  // Whether the sender is gone, and with it the fleet.
  bool over() const { return trainers_[0]->down(); }
  // After the last sync. The workers of a replica ended every one of them alike.
  void shutdown();
  void count(SimReport& report) const;

 private:
  // What a worker's modules were as the sync was opened, in one life of it.
  struct Before {
    std::int64_t life = 0;
    std::vector<ModuleState> modules;
    bool busy = false;          // still ending an earlier sync, whose outcome does not depend on it
    std::uint64_t version = 0;  // of that
  };

  // What a sync is opened in.
  struct Opening {
    std::set<Member> lost_between;
    std::set<std::uint32_t> joined;  // workers that are there
    std::set<std::uint32_t> lost_ranks;
    std::vector<std::uint32_t> rank_lives;
    std::uint32_t allowed = 0;
  };

  void strike(const Fault& fault);
  bool strike_between();
  void hit(std::uint32_t consumer);
  void restart(std::uint32_t consumer);
  void hit_rank(std::uint32_t rank);
  void restart_rank(std::uint32_t rank);
  bool heal_ranks(bool everybody);
  bool heal(bool everybody);
  bool sync_is_over() const;
  bool absent(std::uint32_t rank) const;
  void note_before();
  void note_opening(std::uint32_t allowed);
  void call(std::uint32_t rank, std::uint64_t sync_id, std::uint64_t version, std::uint32_t allowed,
            const NameSet& names);
  bool wait_for(const std::function<bool()>& over, const std::string& what);

  void check(std::uint64_t version, const NameSet& names);
  void check_opening(const SyncOutcome& outcome);
  void check_ranks();
  void check_modules(std::uint64_t version, const NameSet& names, bool committing);
  void check_success(std::uint64_t version, const SyncOutcome& outcome, const NameSet& names);
  void check_failure(const Status& why, const NameSet& names);
  void check_drops();
  void check_commits();
  bool mate_struck(std::uint32_t consumer) const;

  World& world_;
  const SimModel& model_;
  Random random_;  // of faults alone: without them runs are what they were
  SlotReaders readers_;
  std::vector<std::unique_ptr<SimTrainer>> trainers_;  // the latest life of each
  std::vector<std::unique_ptr<SimTrainer>> dead_trainers_;
  std::vector<std::unique_ptr<SimWorker>> workers_;  // the latest life of each
  std::vector<std::unique_ptr<SimWorker>> dead_;     // earlier ones
  std::vector<std::int64_t> lives_;                  // by worker
  std::vector<std::int64_t> hit_;                    // by worker: the latest life that something ended; or -1
  std::vector<std::uint32_t> rank_lives_;            // by trainer
  std::vector<std::int64_t> rank_hit_;               // as hit_
  std::vector<std::uint32_t> peaks_;                 // by trainer
  std::uint64_t last_steps_ = 300;                   // of the sync before

  // The sync at hand.
  std::uint64_t sync_id_ = 0;
  std::vector<bool> called_;  // by trainer
  std::vector<Before> before_;
  Opening opening_;
  Struck struck_;                                          // what is not healed yet, too
  std::set<std::pair<std::uint32_t, std::uint32_t>> cut_;  // struck_.cut, in this sync
  bool estranged_ = false;                                 // likewise
  bool ending_ = false;  // a fault of the kind that ends a fleet has been drawn

  std::uint32_t completed_ = 0, failed_ = 0, refused_ = 0, corrupt_ = 0, lossy_ = 0, rejoined_ = 0;
  std::uint32_t rank_lossy_ = 0, ranks_returned_ = 0, lost_between_ = 0;
  std::vector<std::string> faults_;
  std::int64_t longest_ns_ = 0;
};

}  // namespace shardpull::sim
