// Building blocks of this room's tests: small models written down by hand, and a naive executor of plans that
// moves every element by itself, against which layouts, cuts and coverage are checked.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "shardpull/bake.h"
#include "shardpull/source.h"
#include "shardpull/tensor.h"

namespace shardpull::plan_testing {

// Ends the test program with a message when a step that cannot fail has failed.
template <typename T>
T must(Result<T> result) {
  if (!result.ok()) {
    fprintf(stderr, "unexpected: %s\n", result.status().to_string().c_str());
    abort();
  }
  return std::move(result).value();
}

TensorMeta meta(std::string name, std::vector<std::int64_t> shape, DType dtype = DType::kBF16);

// Tables of `producers` trainers that hold everything, `consumers` workers of one replica, groups by
// form_groups.
InitTables make_tables(std::vector<TensorMeta> metadata, std::uint32_t producers = 1,
                       std::uint32_t consumers = 1);

// What each of `ranks` trainers holds: a Holding that knows the metadata and holds nothing yet.
std::vector<Holding> holdings_of(const std::vector<TensorMeta>& metadata, std::uint32_t ranks);
void hold(Holding& holding, std::uint32_t name);
void hold(Holding& holding, std::uint32_t name, Box box);

// Writes a Recording step by step.
class RecordingBuilder {
 public:
  explicit RecordingBuilder(const std::vector<TensorMeta>& metadata) : metadata_(metadata) {}

  // A parameter of `module` (made at its first mention), contiguous.
  std::uint32_t parameter(const std::string& module, const std::string& name, std::vector<std::int64_t> shape,
                          DType dtype = DType::kBF16);
  // The fake of a name, to make chains of.
  Tensor fake(std::uint32_t name) const;
  // A copy of `source` (made from fake(name)) into a window.
  void copy(std::uint32_t name, const Tensor& source, std::uint32_t parameter, std::int64_t offset,
            std::vector<std::int64_t> shape, std::vector<std::int64_t> stride);
  // Into the whole of a parameter of the same shape.
  void copy(std::uint32_t name, const Tensor& source, std::uint32_t parameter);
  // Into a contiguous block that starts `offset` elements into the parameter.
  void copy_at(std::uint32_t name, const Tensor& source, std::uint32_t parameter, std::int64_t offset);
  // A parameter of a module of its own, filled by one copy.
  void whole(const std::string& module, std::uint32_t name, const Tensor& source);
  void fill(std::uint32_t parameter);
  // Live and dead names are those with and without copies.
  Recording build() const;

 private:
  std::vector<TensorMeta> metadata_;
  Recording recording_;
  std::map<std::string, std::uint32_t> modules_;
};

std::vector<std::int64_t> contiguous_stride(const std::vector<std::int64_t>& shape);
// Positions of a slice's elements, in order.
std::vector<std::int64_t> elements_of(const Slice& slice);
// Positions of a window's elements, row-major.
std::vector<std::int64_t> elements_of(const Destination& window);
// Positions in the tensor of a piece's elements, in the piece's row-major order. Both in elements of the same
// dtype.
std::vector<std::int64_t> elements_of(const Box& box, const std::vector<std::int64_t>& shape);

// Where each element of each parameter comes from: (parameter, position) -> (name, position in the tensor).
// By the recording alone, or by running the plan: pack by every run's layout, scatter from the slot. Windows
// and wire elements correspond one to one. A position written twice, a key outside its run, overlapping keys:
// reported as a failure text.
using Origins = std::map<std::pair<std::uint32_t, std::int64_t>, std::pair<std::uint32_t, std::int64_t>>;
std::string origins_of(const Recording& recording, Origins& out);
std::string origins_of(const WorkerPlan& plan, const InitTables& tables, Origins& out);

// The parameters of a worker, byte by byte: what was written and how often.
struct ParameterBytes {
  std::vector<std::uint8_t> bytes, writes;
  friend bool operator==(const ParameterBytes&, const ParameterBytes&) = default;
};
using WorkerBytes = std::vector<ParameterBytes>;  // by parameter

// Two ways to fill a worker from tensors whose bytes are coded by name and position; windows and wire
// elements of the same dtype. By the recording: straight from the whole tensors. By the plan: each trainer
// packs what the encoded pulls tell it to out of the boxes that it declared, the worker scatters from its
// slots. A failure text when a trainer does not hold what it shall pack, or a side reads or writes outside.
std::string bytes_of_recording(const std::vector<TensorMeta>& metadata, const Recording& recording,
                               WorkerBytes& out);
std::string bytes_of_plan(const InitTables& tables, const std::vector<Holding>& holdings,
                          const Recording& recording, const WorkerPlan& plan, WorkerBytes& out);

}  // namespace shardpull::plan_testing
