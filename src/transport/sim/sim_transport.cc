// One lock guards the whole network; it is never held while a sink is called or bytes are copied. What a
// transport has to do lies in its inbox, ordered by due time: messages and closings of peers, and the next
// piece of each read.
#include "transport/sim/sim_transport.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/mutex.h"
#include "base/random.h"
#include "base/status_macros.h"
#include "transport/hot_wire.h"

namespace shardpull {
namespace {

Status unavailable(std::string message) {
  return Status(StatusCode::kUnavailable, std::move(message),
                {.reason = Reason::kPeerLost, .fault = Fault::kPeer});
}

// The bytes of an exported region. Peers that were granted it keep them, as a mapping would.
struct Block {
  std::vector<std::byte> bytes;
};

// What a transport exports now. Memory may outlive it.
struct Exported {
  std::atomic<std::uint64_t> regions{0}, bytes{0};
};

struct Grant {
  std::uint32_t generation = 0;
  std::shared_ptr<Block> block;
};

struct Event {
  enum class Kind : std::uint8_t { kAccepted, kMessage, kClosed, kRead };
  Kind kind = Kind::kMessage;
  EndpointId endpoint = 0;
  std::vector<std::byte> bytes;  // message: header and payload
  Status status;                 // closed
  ReadToken token = 0;           // read
};

struct Read {
  EndpointId endpoint = 0;
  std::shared_ptr<Block> block;
  std::uint64_t offset = 0, bytes = 0, done = 0;
  std::byte* local = nullptr;
  Status status;  // of a read that was refused: reported, not run
};

struct Endpoint {
  EndpointId peer = 0;                     // 0: the peer is gone
  std::int64_t last_due_ns = 0;            // of what was sent from here: order is kept
  std::map<std::uint32_t, Grant> granted;  // what the peer lets us reach, by region
};

using Inbox = std::map<std::pair<std::int64_t, std::uint64_t>, Event>;  // by due time, then order of sending

// One transport's part of the network, guarded by the network's lock.
struct Node {
  std::string name;
  bool listening = false;
  Inbox inbox;
  std::map<EndpointId, Endpoint> endpoints;
  std::map<ReadToken, Read> reads;
  CondVar wake;
  bool woken = false;
};

}  // namespace

struct SimNet::State {
  State(const Clock& given, const SimNetOptions& settings)
      : clock(given), options(settings), random(settings.seed) {}
  const Clock& clock;
  const SimNetOptions options;

  Mutex mutex;
  Random random SHARDPULL_GUARDED_BY(mutex);
  std::vector<Node*> nodes SHARDPULL_GUARDED_BY(mutex);                // all transports
  std::map<std::string, Node*> listeners SHARDPULL_GUARDED_BY(mutex);  // by address
  std::map<EndpointId, Node*> node_of SHARDPULL_GUARDED_BY(mutex);     // endpoints alive
  EndpointId next_endpoint SHARDPULL_GUARDED_BY(mutex) = 1;
  std::uint32_t next_region SHARDPULL_GUARDED_BY(mutex) = 1;
  std::uint64_t next_order SHARDPULL_GUARDED_BY(mutex) = 0;

  std::int64_t delay() SHARDPULL_REQUIRES(mutex) {
    return random.between(options.min_delay_ns, std::max(options.min_delay_ns, options.max_delay_ns));
  }

  void post(Node& node, std::int64_t due_ns, Event event) SHARDPULL_REQUIRES(mutex) {
    node.inbox.emplace(std::pair(due_ns, next_order++), std::move(event));
    node.wake.notify_all();
  }

  // From `endpoint` of `node` to its peer, after what was sent before.
  void post_to_peer(Node& node, EndpointId id, Event event) SHARDPULL_REQUIRES(mutex) {
    Endpoint& endpoint = node.endpoints.at(id);
    const auto peer = node_of.find(endpoint.peer);
    if (peer == node_of.end()) return;
    endpoint.last_due_ns = std::max(endpoint.last_due_ns, clock.now_ns() + delay());
    event.endpoint = endpoint.peer;
    post(*peer->second, endpoint.last_due_ns, std::move(event));
  }

  // What is under way to the endpoint, and was not read by its owner, arrives at `until_ns` or later.
  void hold(Node& node, EndpointId id, std::int64_t until_ns) SHARDPULL_REQUIRES(mutex) {
    Inbox held;
    for (auto it = node.inbox.begin(); it != node.inbox.end() && it->first.first < until_ns;) {
      const bool sent = it->second.endpoint == id && it->second.kind != Event::Kind::kRead;
      const auto next = std::next(it);
      if (sent) {
        auto event = node.inbox.extract(it);
        event.key().first = until_ns;
        held.insert(std::move(event));
      }
      it = next;
    }
    node.inbox.merge(held);
  }

  void close(Node& node, EndpointId id, const Status& why) SHARDPULL_REQUIRES(mutex) {
    const auto it = node.endpoints.find(id);
    if (it == node.endpoints.end()) return;
    post_to_peer(node, id, Event{Event::Kind::kClosed, 0, {}, why, 0});
    node_of.erase(id);
    node.endpoints.erase(it);
  }
};

class SimTransport final : public Transport {
 public:
  SimTransport(std::shared_ptr<SimNet::State> net, std::string name, FleetToken token,
               Incarnation incarnation)
      : net_(std::move(net)), token_(token), incarnation_(incarnation) {
    node_.name = std::move(name);
    const MutexLock lock(net_->mutex);
    net_->nodes.push_back(&node_);
  }
  ~SimTransport() override {
    const MutexLock lock(net_->mutex);
    while (!node_.endpoints.empty()) {
      net_->close(node_, node_.endpoints.begin()->first, unavailable(fmt::format("{} is gone", node_.name)));
    }
    if (node_.listening) net_->listeners.erase(address());
    std::erase(net_->nodes, &node_);
  }

  std::string name() const override { return "sim"; }
  bool can_map() const override { return true; }

  Result<std::shared_ptr<ExportedMemory>> allocate(std::uint64_t bytes, std::string_view what) override {
    if (bytes == 0 || bytes > kMaxBytes) {
      return Status(StatusCode::kResourceExhausted,
                    fmt::format("{} bytes for {} in a simulation", bytes, what),
                    {.reason = Reason::kNoMemory});
    }
    auto block = std::make_shared<Block>();
    block->bytes.resize(bytes);
    const MutexLock lock(net_->mutex);
    MemoryRef ref;
    ref.address = block->bytes.data();
    ref.bytes = bytes;
    ref.region = net_->next_region++;
    ref.generation = 1;
    return std::shared_ptr<ExportedMemory>(std::make_shared<Memory>(ref, std::move(block), exported_));
  }

  Result<std::string> listen() override {
    const MutexLock lock(net_->mutex);
    if (!net_->listeners.emplace(address(), &node_).second) {
      return Status(StatusCode::kAlreadyExists, fmt::format("{} is listened at already", address()),
                    {.reason = Reason::kHost});
    }
    node_.listening = true;
    return address();
  }

  Result<EndpointId> connect(const std::string& address, std::int64_t timeout_ns) override {
    (void)timeout_ns;
    const MutexLock lock(net_->mutex);
    const auto it = net_->listeners.find(address);
    if (it == net_->listeners.end()) return unavailable(fmt::format("nobody listens at {}", address));
    const EndpointId mine = net_->next_endpoint++, theirs = net_->next_endpoint++;
    node_.endpoints[mine].peer = theirs;
    it->second->endpoints[theirs].peer = mine;
    net_->node_of[mine] = &node_;
    net_->node_of[theirs] = it->second;
    net_->post_to_peer(node_, mine, Event{Event::Kind::kAccepted, 0, {}, {}, 0});
    return mine;
  }

  Status send(EndpointId id, HotHeader header, const std::byte* payload, std::size_t length) override {
    if (length > kMaxHotPayloadBytes) {
      return Status(StatusCode::kResourceExhausted, fmt::format("a payload of {} bytes", length),
                    {.reason = Reason::kLimit});
    }
    header.length = static_cast<std::uint32_t>(length);
    header.sum = payload_sum(payload, length);
    if (header.token == 0) header.token = token_;
    if (header.incarnation == 0) header.incarnation = incarnation_;
    const auto encoded = encode(header);
    Event event;
    event.bytes.assign(encoded.begin(), encoded.end());
    event.bytes.insert(event.bytes.end(), payload, payload + length);
    const MutexLock lock(net_->mutex);
    const auto it = node_.endpoints.find(id);
    if (it == node_.endpoints.end() || !net_->node_of.contains(it->second.peer)) {
      return unavailable(fmt::format("endpoint {} of {} is closed", id, node_.name));
    }
    ++counters_.messages;
    counters_.header_bytes += event.bytes.size();
    net_->post_to_peer(node_, id, std::move(event));
    return {};
  }

  Status grant(EndpointId id, const std::shared_ptr<ExportedMemory>& memory) override {
    const auto* mine = dynamic_cast<const Memory*>(memory.get());
    if (mine == nullptr) {
      return Status(StatusCode::kInvalidArgument, "only memory that this transport allocated can be granted",
                    {.reason = Reason::kBadArgument});
    }
    const MutexLock lock(net_->mutex);
    const auto it = node_.endpoints.find(id);
    if (it == node_.endpoints.end())
      return unavailable(fmt::format("endpoint {} of {} is closed", id, node_.name));
    const auto peer = net_->node_of.find(it->second.peer);
    if (peer == net_->node_of.end())
      return unavailable(fmt::format("endpoint {} of {} is closed", id, node_.name));
    peer->second->endpoints.at(it->second.peer).granted[mine->ref().region] = {mine->ref().generation,
                                                                               mine->block};
    return {};
  }

  void close(EndpointId id) override {
    const MutexLock lock(net_->mutex);
    for (auto& [token, read] : node_.reads) {
      if (read.endpoint == id) read.status = unavailable("the endpoint was closed");
    }
    net_->close(node_, id, unavailable(fmt::format("closed by {}", node_.name)));
  }

  void read(EndpointId id, const RemoteRef& remote, std::byte* local, ReadToken token) override {
    const MutexLock lock(net_->mutex);
    Read read;
    read.endpoint = id;
    read.local = local;
    auto window = find_window(id, remote);
    if (window.ok()) {
      read.block = *window;
      read.offset = remote.offset;
      read.bytes = remote.bytes;
    } else {
      read.status = window.status();
    }
    node_.reads[token] = std::move(read);
    net_->post(node_, net_->clock.now_ns() + net_->delay(), Event{Event::Kind::kRead, id, {}, {}, token});
  }

  Result<Mapping> map(EndpointId id, const RemoteRef& remote) override {
    const MutexLock lock(net_->mutex);
    SHARDPULL_ASSIGN_OR_RETURN(std::shared_ptr<Block> block, find_window(id, remote));
    const std::byte* const data = block->bytes.data() + remote.offset;
    return Mapping{data, std::move(block)};
  }

  void add_mapped_bytes(std::uint64_t bytes) override {
    const MutexLock lock(net_->mutex);
    counters_.payload_bytes_read += bytes;
  }

  Status progress(std::int64_t timeout_ns, TransportSink& sink) override {
    std::vector<Event> due;
    {
      const MutexLock lock(net_->mutex);
      due = take_due();
      if (due.empty() && !node_.woken && timeout_ns > 0) {
        std::int64_t wait_ns = timeout_ns;
        if (!node_.inbox.empty())
          wait_ns = std::min(wait_ns, node_.inbox.begin()->first.first - net_->clock.now_ns());
        node_.wake.wait_for_ns(net_->mutex, std::max<std::int64_t>(wait_ns, 0));
        due = take_due();
      }
      node_.woken = false;
    }
    for (Event& event : due) handle(event, sink);
    return {};
  }

  void wake() override {
    const MutexLock lock(net_->mutex);
    node_.woken = true;
    node_.wake.notify_all();
  }

  TransportCounters counters() const override {
    const MutexLock lock(net_->mutex);
    TransportCounters counters = counters_;
    counters.endpoints = node_.endpoints.size();
    counters.regions = exported_->regions;
    counters.region_bytes = exported_->bytes;
    return counters;
  }

 private:
  static constexpr std::uint64_t kMaxBytes = 1ull << 32;

  class Memory final : public ExportedMemory {
   public:
    Memory(const MemoryRef& ref, std::shared_ptr<Block> given, std::shared_ptr<Exported> exported)
        : block(std::move(given)), exported_(std::move(exported)) {
      ref_ = ref;
      exported_->regions += 1;
      exported_->bytes += ref.bytes;
    }
    ~Memory() override {
      std::fill(block->bytes.begin(), block->bytes.end(), SimNet::kFreedByte);
      exported_->regions -= 1;
      exported_->bytes -= ref_.bytes;
    }
    const std::shared_ptr<Block> block;

   private:
    const std::shared_ptr<Exported> exported_;
  };

  std::string address() const { return "sim:" + node_.name; }

  std::vector<Event> take_due() SHARDPULL_REQUIRES(net_->mutex) {
    std::vector<Event> due;
    const std::int64_t now_ns = net_->clock.now_ns();
    while (!node_.inbox.empty() && node_.inbox.begin()->first.first <= now_ns) {
      due.push_back(std::move(node_.inbox.begin()->second));
      node_.inbox.erase(node_.inbox.begin());
    }
    return due;
  }

  // The block of a window that was granted to us, or why not.
  Result<std::shared_ptr<Block>> find_window(EndpointId id, const RemoteRef& remote) const
      SHARDPULL_REQUIRES(net_->mutex) {
    const auto refuse = [&](StatusCode code, std::string problem) {
      return Status(code,
                    fmt::format("region {} generation {} window [{}, +{}): {}", remote.region,
                                remote.generation, remote.offset, remote.bytes, problem),
                    {.reason = Reason::kBadArgument, .fault = Fault::kPeer});
    };
    const auto endpoint = node_.endpoints.find(id);
    if (endpoint == node_.endpoints.end())
      return unavailable(fmt::format("endpoint {} of {} is closed", id, node_.name));
    const auto grant = endpoint->second.granted.find(remote.region);
    if (grant == endpoint->second.granted.end()) return refuse(StatusCode::kNotFound, "not granted");
    if (grant->second.generation != remote.generation) {
      return refuse(StatusCode::kFailedPrecondition,
                    fmt::format("the region's generation is {}", grant->second.generation));
    }
    const std::uint64_t size = grant->second.block->bytes.size();
    if (remote.offset > size || remote.bytes > size - remote.offset) {
      return refuse(StatusCode::kOutOfRange, fmt::format("the region has {} bytes", size));
    }
    return grant->second.block;
  }

  void handle(Event& event, TransportSink& sink) {
    {
      const MutexLock lock(net_->mutex);
      if (event.kind != Event::Kind::kRead && !node_.endpoints.contains(event.endpoint))
        return;  // closed here meanwhile
    }
    switch (event.kind) {
      case Event::Kind::kAccepted:
        return sink.on_accepted(event.endpoint);
      case Event::Kind::kMessage:
        return deliver(event, sink);
      case Event::Kind::kClosed:
        return lost(event.endpoint, event.status, sink);
      case Event::Kind::kRead:
        return advance_read(event.token, sink);
    }
  }

  void deliver(const Event& event, TransportSink& sink) {
    Result<HotHeader> header = decode_hot_header(event.bytes.data(), event.bytes.size());
    Status wrong = header.status();
    if (wrong.ok() && header->token != token_) {
      wrong = Status(StatusCode::kUnauthenticated, "another fleet token",
                     {.reason = Reason::kBadToken, .fault = Fault::kPeer});
    }
    if (!wrong.ok()) {
      {
        const MutexLock lock(net_->mutex);
        net_->close(node_, event.endpoint, wrong);
      }
      return sink.on_closed(event.endpoint, wrong);
    }
    {
      const MutexLock lock(net_->mutex);
      counters_.header_bytes += event.bytes.size();
    }
    sink.on_message(event.endpoint, *header, event.bytes.data() + kHotHeaderBytes);
  }

  void lost(EndpointId id, const Status& why, TransportSink& sink) {
    std::vector<ReadToken> ended;
    {
      const MutexLock lock(net_->mutex);
      for (const auto& [token, read] : node_.reads) {
        if (read.endpoint == id) ended.push_back(token);
      }
      for (const ReadToken token : ended) node_.reads.erase(token);
      net_->node_of.erase(id);
      node_.endpoints.erase(id);
    }
    for (const ReadToken token : ended) report_read(sink, token, why);
    sink.on_closed(id, why);
  }

  void advance_read(ReadToken token, TransportSink& sink) {
    Read piece;
    {
      const MutexLock lock(net_->mutex);
      const auto it = node_.reads.find(token);
      if (it == node_.reads.end()) return;  // ended with its endpoint
      piece = it->second;
      if (!piece.status.ok() || piece.done == piece.bytes) {
        if (piece.status.ok()) counters_.payload_bytes_read += piece.bytes;
        node_.reads.erase(it);
      } else {
        it->second.done += std::min(net_->options.piece_bytes, piece.bytes - piece.done);
        net_->post(node_, net_->clock.now_ns() + net_->random.between(0, net_->options.max_piece_ns),
                   Event{Event::Kind::kRead, piece.endpoint, {}, {}, token});
      }
    }
    if (!piece.status.ok() || piece.done == piece.bytes) return report_read(sink, token, piece.status);
    std::memcpy(piece.local + piece.done, piece.block->bytes.data() + piece.offset + piece.done,
                std::min(net_->options.piece_bytes, piece.bytes - piece.done));
  }

  const std::shared_ptr<SimNet::State> net_;
  const FleetToken token_;
  const Incarnation incarnation_;
  Node node_;
  TransportCounters counters_;
  const std::shared_ptr<Exported> exported_ = std::make_shared<Exported>();
};

SimNet::SimNet(const Clock& clock, const SimNetOptions& options)
    : state_(std::make_shared<State>(clock, options)) {}
SimNet::~SimNet() = default;

void SimNet::cut(const std::string& one, const std::string& other) {
  const MutexLock lock(state_->mutex);
  for (Node* node : state_->nodes) {
    if (node->name != one) continue;
    for (const auto& [id, endpoint] : node->endpoints) {
      const auto peer = state_->node_of.find(endpoint.peer);
      if (peer == state_->node_of.end() || peer->second->name != other) continue;
      const Status why = unavailable(fmt::format("the connection of {} and {} was cut", one, other));
      const std::int64_t now_ns = state_->clock.now_ns();
      state_->post(*node, now_ns + state_->delay(), Event{Event::Kind::kClosed, id, {}, why, 0});
      state_->post(*peer->second, now_ns + state_->delay(),
                   Event{Event::Kind::kClosed, endpoint.peer, {}, why, 0});
    }
  }
}

void SimNet::hold(const std::string& name, std::int64_t until_ns) {
  const MutexLock lock(state_->mutex);
  for (Node* node : state_->nodes) {
    if (node->name != name) continue;
    for (auto& [id, endpoint] : node->endpoints) {
      endpoint.last_due_ns = std::max(endpoint.last_due_ns, until_ns);
      state_->hold(*node, id, until_ns);
      const auto peer = state_->node_of.find(endpoint.peer);
      if (peer == state_->node_of.end()) continue;
      Endpoint& theirs = peer->second->endpoints.at(endpoint.peer);
      theirs.last_due_ns = std::max(theirs.last_due_ns, until_ns);
      state_->hold(*peer->second, endpoint.peer, until_ns);
    }
  }
}

std::optional<std::int64_t> SimNet::next_due_ns() const {
  const MutexLock lock(state_->mutex);
  std::optional<std::int64_t> next;
  for (const Node* node : state_->nodes) {
    if (node->inbox.empty()) continue;
    const std::int64_t due_ns = node->inbox.begin()->first.first;
    if (!next || due_ns < *next) next = due_ns;
  }
  return next;
}

std::unique_ptr<Transport> SimNet::open(std::string name, FleetToken token, Incarnation incarnation) {
  return std::make_unique<SimTransport>(state_, std::move(name), token, incarnation);
}

}  // namespace shardpull
