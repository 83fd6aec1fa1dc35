// What a trainer rank implements: the description of the whole model, what this rank holds, and the tensors
// themselves, gather group by gather group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shardpull/api.h"
#include "shardpull/dtype.h"
#include "shardpull/status.h"

namespace shardpull {

// One checkpoint tensor: name, wire-facing dtype and GLOBAL shape. Immutable.
struct TensorMeta {
  std::string name;                 // UTF-8
  DType dtype = DType::kF32;        // that the tensor travels in
  std::vector<std::int64_t> shape;  // of the whole tensor
  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

// A box in a tensor's global shape: per dim [start, start+size). Empty vectors mean the whole tensor.
struct Box {
  std::vector<std::int64_t> start;              // per dim
  std::vector<std::int64_t> size;               // per dim
  bool whole() const { return start.empty(); }  // whether it is the whole tensor
  friend bool operator==(const Box&, const Box&) = default;
};

// What one rank holds of one name. Whole tensors are the common box.
struct Piece {
  std::uint32_t name = 0;  // index into the metadata
  Box box;                 // in the tensor's global shape
  std::uint32_t rank = 0;  // that holds it
  friend bool operator==(const Piece&, const Piece&) = default;
};

// A view over the source's memory. Borrowed: valid and unchanged from the moment it is yielded until the
// group it belongs to has been freed (the source is told by GroupStream::released).
struct TensorView {
  const std::byte* data = nullptr;     // the view's first element
  DType dtype = DType::kF32;           // equals the metadata's
  std::vector<std::int64_t> shape;     // equals the metadata's shape (or the piece's box)
  std::vector<std::int64_t> stride;    // in elements; may be any non-negative strides
  const std::byte* storage = nullptr;  // start of the underlying storage (several views may share one)
  std::uint64_t storage_bytes = 0;     // its size; decides packing (export_pack_limit)
};

// Gather groups cut the metadata's list by each name's first path part that is a number: "model.layers.7.a" and
// "model.layers.7.b" are of one group, as is each run of names without such a part. They are numbered in order
// of first appearance; a group's names follow one another (docs/PROTOCOL.md, "Gather groups").
//
// One name (or piece) of a gather group as a source yields it. Every name of the group has an entry, in
// metadata order; a name held in n pieces has n of them, in the order of held_pieces(). What this rank does
// not hold, and what a sync of some names does not ask for, carries no view.
struct NamedView {
  std::uint32_t name = 0;   // index into the metadata
  std::uint32_t piece = 0;  // which of this rank's pieces of the name; 0 for a name held whole
  std::optional<TensorView> view;  // nothing: not held, or not asked for
};

// A gather group as a source yields it.
struct GroupTensors {
  std::uint32_t group = 0;         // its number
  std::vector<NamedView> tensors;  // an entry for every name of it, in metadata order
};

// One pass over a rank's owned groups. Destroying it is the source's closing code: it runs after the last
// group and on every error path.
class SHARDPULL_API GroupStream {
 public:
  virtual ~GroupStream() = default;
  // The next owned group in group order, or nothing at the end. Called only once credit for one more group is
  // there; after the last group it is called once more and must give nothing. May be a collective among the
  // group's owners.
  virtual Result<std::optional<GroupTensors>> next() = 0;
  // Nobody reads the views of `group` any more: its memory may be written or freed. Groups free in any order.
  virtual void released(std::uint32_t group) { (void)group; }
};

// What one sync asks of the source.
struct SyncRequest {
  std::uint64_t sync_id = 0;          // the sender's number
  std::uint64_t version = 0;          // what send_weights was called with
  std::vector<std::uint32_t> groups;  // the owned groups to yield, ascending
  // The names this sync is restricted to, ascending; empty: all. Only they need views, and only groups that
  // have one of them are asked for.
  std::vector<std::uint32_t> names;
};

// Trainer-side source of weights. One per rank. Called from the thread that calls Trainer::send_weights,
// never from two threads at once.
class SHARDPULL_API WeightSource {
 public:
  virtual ~WeightSource() = default;
  // The WHOLE model in gather order, the same on every rank. Called once, at init.
  virtual std::vector<TensorMeta> metadata() const = 0;
  // The names this rank holds whole, by index into metadata(). Default: all of them, but for those that
  // held_pieces() lists.
  virtual std::vector<std::uint32_t> held_names() const;
  // What it holds of other names: boxes in their global shapes (`rank` is ignored), several per name where
  // need be, none empty. Over all ranks they must cover each name; where boxes of several ranks overlap,
  // consumers take the common part from any of them. Called once, at init.
  virtual std::vector<Piece> held_pieces() const { return {}; }
  // Whether what this rank holds stays in place, unchanged, from iter_groups to the end of the sync: it is
  // then published group by group without waiting for credit, and never copied into export buffers. False:
  // the source gathers a group when it is asked for it, and at most lookahead + 1 are resident.
  virtual bool resident() const { return false; }
  // Whether every storage above export_pack_limit that this source yields lies in memory from
  // Trainer::allocate, so that consumers can map it (shm) or read it directly (shm, tcp, ucx; cma reads any). Checked when it is published: a view elsewhere is then
  // an error naming it. False: such tensors are packed. A resident source says it of all its storages: none
  // is copied into an export buffer.
  virtual bool in_engine_memory() const { return false; }
  // Starts a pass. Views yielded must stay valid and unchanged until released(group).
  virtual Result<std::unique_ptr<GroupStream>> iter_groups(const SyncRequest& request) = 0;
};

}  // namespace shardpull
