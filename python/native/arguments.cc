#include <set>

#include "native.h"

namespace shardpull::python {
namespace {

nb::object errors() {
  return nb::module_::import_("shardpull._errors");
}

std::string kind_of(nb::handle value) {
  return nb::cast<std::string>(
      nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()))).attr("__name__"));
}

[[noreturn]] void raise_object(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

bool flag_of(nb::handle value, const std::string& argument) {
  if (!PyBool_Check(value.ptr())) raise_type(argument, "a bool", value);
  return value.ptr() == Py_True;
}

// One of `choices`, by its text.
template <typename T>
T choice_of(nb::handle value, const std::string& argument,
            const std::vector<std::pair<std::string_view, T>>& choices) {
  const std::string given = text_of(value, argument);
  std::string known;
  for (const auto& [text, choice] : choices) {
    if (text == given) return choice;
    known += (known.empty() ? "'" : ", '") + std::string(text) + "'";
  }
  raise_argument(argument + " must be one of " + known + " (it is '" + given + "')");
}
template <typename T>
T choice_of(nb::handle value, const std::string& argument, std::initializer_list<T> choices) {
  std::vector<std::pair<std::string_view, T>> named;
  for (const T choice : choices) named.emplace_back(to_string(choice), choice);
  return choice_of<T>(value, argument, named);
}

// Options by name; what is absent, or None, keeps the C++ default.
class Options {
 public:
  Options(const nb::dict& given, const char* what) : given_(given), what_(what) {}

  template <typename Set>
  void take(const char* name, Set set) {
    known_.emplace(name);
    if (!given_.contains(name)) return;
    const nb::object value = given_[name];
    if (!value.is_none()) set(value, std::string(name));
  }
  void take(const char* name, std::uint32_t& out) {
    take(name, [&](nb::handle value, const std::string& argument) { out = number_of(value, argument); });
  }
  void take(const char* name, std::uint64_t& out) {
    take(name, [&](nb::handle value, const std::string& argument) { out = unsigned_of(value, argument); });
  }
  void take(const char* name, std::string& out) {
    take(name, [&](nb::handle value, const std::string& argument) { out = text_of(value, argument); });
  }
  void take(const char* name, bool& out) {
    take(name, [&](nb::handle value, const std::string& argument) { out = flag_of(value, argument); });
  }

  void take_fleet(FleetOptions& fleet) {
    take("directory", fleet.directory);
    take("token", fleet.token);
    if (!given_.contains("token") || nb::object(given_["token"]).is_none())
      fleet.token = check(token_from_environment());
    take("connect_timeout_ms", fleet.connect_timeout_ms);
    take("stall_timeout_ms", fleet.stall_timeout_ms);
    take("heartbeat_ms", fleet.heartbeat_ms);
    take("dead_after_ms", fleet.dead_after_ms);
    take("settings", fleet.settings);
    take("rendezvous", fleet.rendezvous);
    take("insecure_listen", fleet.insecure_listen);
    take("transport", [&](nb::handle value, const std::string& argument) {
      fleet.transport = choice_of(value, argument,
                                  {TransportKind::kAuto, TransportKind::kShm, TransportKind::kCma,
                                   TransportKind::kTcp, TransportKind::kUcx});
    });
    take("interfaces", fleet.interfaces);
    take("ucx_workers", fleet.ucx_workers);
  }

  void finish() const {
    for (const auto& [key, value] : given_) {
      const std::string name = nb::cast<std::string>(key);
      if (known_.find(name) == known_.end())
        raise_object(errors().attr("InvalidTypeError")(std::string(what_) + " has no option '" + name + "'"));
    }
  }

 private:
  const nb::dict& given_;
  const char* what_;
  std::set<std::string> known_;
};

}  // namespace

nb::object error_of(const Status& status, const std::string& process) {
  constexpr std::string_view kFaults[] = {"user", "peer", "host", "library"};
  const ErrorInfo& info = status.info();
  const auto text = [](std::string_view bytes) {  // names come from files and peers
    return nb::steal<nb::object>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
  };
  return errors().attr("from_status")(text(to_string(status.code())), text(status.message()),
                                      text(to_string(info.reason)),
                                      text(kFaults[static_cast<std::size_t>(info.fault)]), info.retryable,
                                      text(info.peer), text(info.tensor), process);
}

void raise(const Status& status, const std::string& process) {
  raise_object(error_of(status, process));
}

void raise_argument(const std::string& message) {
  raise(Status(StatusCode::kInvalidArgument, message, {.reason = Reason::kBadArgument}));
}

void raise_type(const std::string& argument, const std::string& wanted, nb::handle got) {
  raise_object(errors().attr("InvalidTypeError")(argument + " must be " + wanted + ", not " + kind_of(got)));
}

std::uint64_t unsigned_of(nb::handle value, const std::string& argument, std::uint64_t limit) {
  const std::string range = "an integer from 0 to " + std::to_string(limit);
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) raise_type(argument, range, value);
  const nb::object number = nb::steal(PyNumber_Index(value.ptr()));
  if (!number.is_valid()) throw nb::python_error();
  const std::uint64_t out = PyLong_AsUnsignedLongLong(number.ptr());
  const bool outside = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  if (outside || out > limit)
    raise_argument(argument + " must be " + range + " (it is " + nb::cast<std::string>(nb::str(number)) +
                   ")");
  return out;
}

std::uint32_t number_of(nb::handle value, const std::string& argument) {
  return static_cast<std::uint32_t>(unsigned_of(value, argument, UINT32_MAX));
}

std::string text_of(nb::handle value, const std::string& argument) {
  nb::object text = nb::borrow(value);
  if (!PyUnicode_Check(value.ptr())) {
    text = nb::steal(PyOS_FSPath(value.ptr()));  // a path is a text too
    if (!text.is_valid() || !PyUnicode_Check(text.ptr())) {
      PyErr_Clear();
      raise_type(argument, "a str", value);
    }
  }
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (data == nullptr) {
    PyErr_Clear();
    raise_argument(argument + " is no UTF-8");
  }
  return {data, static_cast<std::size_t>(size)};
}

std::vector<std::int64_t> sizes_of(nb::handle value, const std::string& argument) {
  const nb::object items = nb::steal(PySequence_Fast(value.ptr(), ""));
  if (!items.is_valid()) {
    PyErr_Clear();
    raise_type(argument, "a sequence of integers", value);
  }
  std::vector<std::int64_t> out;
  for (nb::handle item : items)
    out.push_back(
        static_cast<std::int64_t>(unsigned_of(item, argument, static_cast<std::uint64_t>(INT64_MAX))));
  return out;
}

std::vector<TensorMeta> metadata_of(nb::handle value) {
  std::vector<TensorMeta> out;
  const nb::object items = nb::steal(PySequence_Fast(value.ptr(), ""));
  if (!items.is_valid()) {
    PyErr_Clear();
    raise_type("metadata", "a sequence of TensorMeta", value);
  }
  for (nb::handle item : items) {
    if (!nb::hasattr(item, "name") || !nb::hasattr(item, "dtype") || !nb::hasattr(item, "shape"))
      raise_type("metadata[" + std::to_string(out.size()) + "]", "a TensorMeta", item);
    TensorMeta meta;
    meta.name = text_of(item.attr("name"), "metadata[" + std::to_string(out.size()) + "].name");
    const std::string what = "of metadata '" + meta.name + "'";
    meta.dtype = check(dtype_from_name(text_of(item.attr("dtype"), "dtype " + what)));
    meta.shape = sizes_of(item.attr("shape"), "shape " + what);
    out.push_back(std::move(meta));
  }
  return out;
}

TrainerOptions trainer_options(const nb::dict& given) {
  TrainerOptions out;
  Options options(given, "Trainer");
  options.take_fleet(out.fleet);
  options.take("rank", out.rank);
  options.take("world_size", out.world_size);
  options.take("num_consumers", out.num_consumers);
  options.take("num_replicas", out.num_replicas);
  options.take("workers_per_replica", out.workers_per_replica);
  options.take("ring_depth", out.ring_depth);
  options.take("lookahead", out.lookahead);
  options.take("presize_bytes", out.presize_bytes);
  options.take("export_pack_limit_bytes", out.export_pack_limit_bytes);
  options.take("on_consumer_loss", [&](nb::handle value, const std::string& argument) {
    out.on_consumer_loss = choice_of<OnConsumerLoss>(
        value, argument, {{"continue", OnConsumerLoss::kContinue}, {"fail", OnConsumerLoss::kFail}});
  });
  options.take("publish", [&](nb::handle value, const std::string& argument) {
    out.publish = choice_of<PublishMode>(value, argument,
                                         {{"auto", PublishMode::kAuto},
                                          {"gather", PublishMode::kGather},
                                          {"resident", PublishMode::kResident}});
  });
  options.take("integrity", [&](nb::handle value, const std::string& argument) {
    out.integrity = choice_of(value, argument, {Integrity::kOff, Integrity::kWire, Integrity::kFull});
  });
  options.take("trainer_settings", out.settings);
  options.take("trace_file", out.trace_file);
  options.finish();
  return out;
}

ConversionPolicy conversion_policy(nb::handle value, const std::string& argument) {
  return choice_of<ConversionPolicy>(value, argument,
                                     {{"allow", ConversionPolicy::kAllow},
                                      {"widen", ConversionPolicy::kWiden},
                                      {"refuse", ConversionPolicy::kRefuse}});
}

WorkerOptions worker_options(const nb::dict& given) {
  WorkerOptions out;
  Options options(given, "Worker");
  options.take_fleet(out.fleet);
  options.take("consumer", out.consumer);
  options.take("ring_depth", out.ring_depth);
  options.take("max_chunk_bytes", out.max_chunk_bytes);
  options.take("chunk_split", out.chunk_split);
  options.take("pull_split", out.pull_split);
  options.take("path", [&](nb::handle value, const std::string& argument) {
    out.path = choice_of(value, argument,
                         {PathChoice::kAuto, PathChoice::kPacked, PathChoice::kMapped, PathChoice::kDirect});
  });
  options.take("apply", [&](nb::handle value, const std::string& argument) {
    out.apply = choice_of(value, argument, {Apply::kInplace, Apply::kStaged});
  });
  options.take("enable_eplb", [&](nb::handle value, const std::string& argument) {
    out.enable_eplb = flag_of(value, argument);
  });
  options.take("conversions", [&](nb::handle value, const std::string& argument) {
    out.bake.conversions = conversion_policy(value, argument);
  });
  options.take("trace_file", out.trace_file);
  options.finish();
  return out;
}

// ---- Engine

Status Engine::interrupt() {
  if (closing_)
    return Status(StatusCode::kCancelled, "shut down while it waited", {.reason = Reason::kShutdown});
  const nb::gil_scoped_acquire gil;
  if (!error_ && PyErr_CheckSignals() != 0) return keep(nb::python_error());
  return kept_;
}

Status Engine::keep(nb::python_error error) {
  const nb::object text = nb::steal(PyObject_Str(error.value().ptr()));
  if (!text.is_valid()) PyErr_Clear();
  const std::string message = text.is_valid() ? nb::cast<std::string>(text) : std::string();
  const std::string type = kind_of(error.value());
  const Status status(StatusCode::kCancelled,
                      process_ + ": " + type + (message.empty() ? "" : ": " + message));
  if (!error_) {
    error_.emplace(std::move(error));
    kept_ = status;
  }
  return status;
}

void Engine::begin(const char* what) {
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    if (closing_) {
      why = " after shutdown";
    } else if (caller_ == std::this_thread::get_id()) {
      why = " within a callback of another call";
    } else if (caller_ != std::thread::id()) {
      why = " while another thread is in a call";
    } else {
      caller_ = std::this_thread::get_id();
    }
  }
  // Without the lock: raising runs Python code, which another thread may interrupt that wants the lock.
  if (!why.empty())
    raise(Status(StatusCode::kFailedPrecondition, what + why, {.reason = Reason::kWrongState}), process_);
}

void Engine::end() {
  bool close_now = false;
  {
    const std::lock_guard lock(mutex_);
    close_now = closing_ && !closed_;
    if (close_now) closed_ = true;
  }
  if (close_now) {
    const nb::gil_scoped_release released;
    stop();
  }
  const std::lock_guard lock(mutex_);
  caller_ = {};
  idle_.notify_all();
}

void Engine::rethrow() {
  if (!error_) return;
  nb::python_error error = std::move(*error_);
  error_.reset();
  kept_ = {};
  throw error;  // NOLINT: the object is gone from here
}

bool Engine::begin_close() {
  std::unique_lock lock(mutex_);
  closing_ = true;
  if (caller_ == std::this_thread::get_id()) return false;  // end() stops it
  idle_.wait(lock, [&] { return caller_ == std::thread::id(); });
  if (closed_) return false;
  closed_ = true;
  caller_ = std::this_thread::get_id();
  return true;
}

void Engine::end_close() {
  const std::lock_guard lock(mutex_);
  caller_ = {};
  idle_.notify_all();
}

}  // namespace shardpull::python
