// The native module: shardpull's C++ API for Python. It holds the GIL in no wait, keeps no decision, and
// raises what shardpull/_errors.py makes of a Status. Names and meanings are those of include/shardpull.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "shardpull/shardpull.h"

namespace shardpull::python {

namespace nb = nanobind;

// ---- Errors. All of these need the GIL.

// The exception for a status that is not OK; `process` is where it is raised: "trainer 0", or "".
nb::object error_of(const Status& status, const std::string& process);
[[noreturn]] void raise(const Status& status, const std::string& process = {});
[[noreturn]] void raise_argument(const std::string& message);  // a value of the caller: InvalidArgumentError
[[noreturn]] void raise_type(const std::string& argument, const std::string& wanted, nb::handle got);

inline void check(const Status& status, const std::string& process = {}) {
  if (!status.ok()) raise(status, process);
}
template <typename T>
T check(Result<T> result, const std::string& process = {}) {
  if (!result.ok()) raise(result.status(), process);
  return std::move(result).value();
}

// ---- Arguments

// An integer (anything with __index__, but no bool) from 0 to `limit`.
std::uint64_t unsigned_of(nb::handle value, const std::string& argument, std::uint64_t limit = UINT64_MAX);
std::uint32_t number_of(nb::handle value, const std::string& argument);
std::vector<std::int64_t> sizes_of(nb::handle value, const std::string& argument);
std::string text_of(nb::handle value, const std::string& argument);
TrainerOptions trainer_options(const nb::dict& given);
WorkerOptions worker_options(const nb::dict& given);
ConversionPolicy conversion_policy(nb::handle value, const std::string& argument);
std::vector<TensorMeta> metadata_of(nb::handle value);

// ---- Tensors

// A window of memory that belongs to `owner`, or to an array that was taken over (DLPack, buffer protocol).
struct View {
  TensorView view;
  bool writable = false;
  nb::object owner;
  nb::ndarray<> array = {};
};
// What shardpull/_tensors.py makes of any tensor; errors call it `what`.
View view_of(nb::handle tensor, const std::string& what);
nb::dlpack::dtype dlpack_of(DType dtype);

// ---- Models

// A model that Python made, and how many workers write into it.
struct ModelHandle {
  explicit ModelHandle(std::unique_ptr<Model> made) : model(std::move(made)) {}
  ModelHandle(const ModelHandle&) = delete;
  ModelHandle& operator=(const ModelHandle&) = delete;

  std::unique_ptr<Model> model;
  std::atomic<int> users = 0;
};
// Raises what loaders in Python raised in the bake that has just failed, if they did. Needs the GIL.
void rethrow_raised(const ModelHandle& handle);

// ---- Waits

// One Trainer or Worker, whose blocking calls come one at a time and end with the pending signal's exception,
// with that of a callback, or when it is closed.
class Engine {
 public:
  explicit Engine(std::string process) : process_(std::move(process)) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs `work` without the GIL. Then raises what a callback or a signal raised meanwhile.
  template <typename Work>
  auto blocking(const char* what, Work work) {
    begin(what);
    struct End {
      Engine& engine;
      ~End() { engine.end(); }
    };
    const auto run = [&] {
      const End end{*this};
      const nb::gil_scoped_release released;
      return work();
    };
    auto result = run();
    rethrow();
    return result;
  }
  // FleetOptions::interrupt: on the thread of the blocking call.
  Status interrupt();
  // Keeps the exception that a callback raised (the first), and says it as a Status. Needs the GIL.
  Status keep(nb::python_error error);
  // Ends a blocking call of another thread, waits until it has returned, and runs `stop`. From within a
  // callback of such a call: when it returns. Once.
  template <typename Stop>
  void close(Stop stop) {
    const nb::gil_scoped_release released;
    if (begin_close()) {
      stop();
      end_close();
    }
  }
  bool closing() const { return closing_; }
  const std::string& process() const { return process_; }

 protected:
  virtual ~Engine() = default;
  virtual void stop() = 0;  // without the GIL

 private:
  void begin(const char* what);
  void end();
  void rethrow();
  bool begin_close();
  void end_close();

  const std::string process_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::thread::id caller_;  // of the call under way; none: idle
  std::atomic<bool> closing_ = false;
  bool closed_ = false;
  std::optional<nb::python_error> error_;  // the caller's thread
  Status kept_;                            // what it is
};

void bind_tensors(nb::module_& module);
void bind_model(nb::module_& module);
void bind_bake(nb::module_& module);
void bind_fleet(nb::module_& module);

}  // namespace shardpull::python
