// UcxReads: the reads of a transport that are under way, and where their data belongs. Every UCX worker of
// the transport brings data, each on its own thread; so what those threads report is collected here, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/identity.h"
#include "base/mutex.h"
#include "shardpull/status.h"
#include "transport/transport.h"
#include "transport/ucx/ucx_frame.h"
#include "transport/ucx/ucx_memory.h"

namespace shardpull {

// Thread-safe.
class UcxReads {
 public:
  struct Read {
    EndpointId endpoint = 0;
    ReadToken token = 0;
    std::uint64_t offset = 0;  // in the region
    std::uint64_t bytes = 0;
    std::byte* local = nullptr;
    std::shared_ptr<ReadTarget> target;  // instead of `local`
    std::shared_ptr<const UcxRemoteRegion> region;
  };
  // A read that is over.
  struct Settled {
    EndpointId endpoint = 0;
    ReadToken token = 0;
    std::uint64_t bytes = 0;
    Status status;
  };
  // A part of a read that somebody writes; ends with landed().
  struct Part {
    std::uint64_t read = 0;
    std::uint64_t bytes = 0;
    std::uint64_t offset = 0;  // in the region
    std::byte* local = nullptr;
    std::shared_ptr<ReadTarget> target;  // instead of `local`, with the place within the read
    std::uint64_t place = 0;
    bool copied = false;  // by this process, not by UCX
    std::shared_ptr<const UcxRemoteRegion> region;
  };

  // ---- peers ----

  // Data that begins with `key` comes from this endpoint from now on, until dismiss().
  void admit(std::uint64_t key, EndpointId endpoint, std::string peer, FleetToken token,
             Incarnation incarnation);
  void dismiss(std::uint64_t key);
  // The endpoint cannot go on; take_failures() has it.
  void fail_endpoint(EndpointId endpoint, Status why);

  // ---- reads ----

  // Returns its number.
  std::uint64_t add(Read read);
  // One that was over before it began.
  void settle(Settled read);
  // The next part to fetch, of at most `max_bytes`; none when all are under way or the read has failed.
  std::optional<Part> next_part(std::uint64_t number, std::uint64_t max_bytes);
  // Where data that arrived belongs; `copied` says that the caller copies it. None when nobody waits for it
  // any more, or when it is not what was asked: then its endpoint has failed.
  std::optional<Part> place(std::uint64_t key, const UcxFrame& frame, std::uint64_t length, bool copied);
  void landed(const Part& part, Status status);
  // The owner does not send it, or not all of it.
  void refused(std::uint64_t number, EndpointId endpoint, Status why);
  // Fails all reads of an endpoint that UCX has let go of, so that only a copy may still be under way. False
  // when one is: to be asked again.
  bool end_all(EndpointId endpoint, const Status& why);

  // ---- what happened ----

  bool has_news() const;
  std::vector<Settled> take_settled();
  std::vector<std::pair<EndpointId, Status>> take_failures();

 private:
  struct Entry {
    Read read;
    std::uint64_t asked = 0;  // bytes under way or landed
    std::uint64_t landed = 0;
    std::uint32_t operations = 0;  // of UCX that may write to `local`
    std::uint32_t copies = 0;      // of ours
    Status failed;
  };
  struct Peer {
    EndpointId endpoint = 0;
    std::string name;
    FleetToken token = 0;
    Incarnation incarnation = 0;
  };
  void settle_if_over(std::unordered_map<std::uint64_t, Entry>::iterator entry) SHARDPULL_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::unordered_map<std::uint64_t, Peer> peers_ SHARDPULL_GUARDED_BY(mutex_);  // by key
  std::uint64_t last_ SHARDPULL_GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::uint64_t, Entry> reads_ SHARDPULL_GUARDED_BY(mutex_);
  std::vector<Settled> settled_ SHARDPULL_GUARDED_BY(mutex_);
  std::vector<std::pair<EndpointId, Status>> failures_ SHARDPULL_GUARDED_BY(mutex_);
};

}  // namespace shardpull
