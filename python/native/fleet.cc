// Trainer and Worker. A weight source in Python is asked on the thread that called, with the GIL; what it
// yields is held until the engine has released the group.
#include <atomic>
#include <map>
#include <memory>
#include <string>

#include "native.h"

namespace shardpull::python {
namespace {

class Source final : public WeightSource {
 public:
  // Asks the Python source for everything that does not change, so that what it raises is raised here.
  Source(Engine& engine, nb::handle source) : engine_(engine), source_(source) {
    metadata_ = metadata_of(source.attr("metadata")());
    resident_ = nb::cast<bool>(nb::bool_(source.attr("resident")()));
    in_engine_memory_ = nb::cast<bool>(nb::bool_(source.attr("in_engine_memory")()));
    for (nb::handle item : nb::object(source.attr("held_pieces")())) {
      Piece piece;
      piece.name = number_of(item.attr("name"), "held_pieces()[...].name");
      piece.box = {sizes_of(item.attr("start"), "held_pieces()[...].start"),
                   sizes_of(item.attr("size"), "held_pieces()[...].size")};
      pieces_.push_back(std::move(piece));
    }
    const nb::object names = source.attr("held_names")();
    if (!names.is_none()) {
      held_.emplace();
      for (nb::handle name : names) held_->push_back(number_of(name, "held_names()[...]"));
    }
  }

  std::vector<TensorMeta> metadata() const override { return metadata_; }
  std::vector<std::uint32_t> held_names() const override {
    return held_ ? *held_ : WeightSource::held_names();
  }
  std::vector<Piece> held_pieces() const override { return pieces_; }
  bool resident() const override { return resident_; }
  bool in_engine_memory() const override { return in_engine_memory_; }
  Result<std::unique_ptr<GroupStream>> iter_groups(const SyncRequest& request) override;

 private:
  friend class Stream;

  Engine& engine_;
  const nb::handle source_;  // the Python Trainer owns it
  std::vector<TensorMeta> metadata_;
  std::vector<Piece> pieces_;
  std::optional<std::vector<std::uint32_t>> held_;
  bool resident_ = false, in_engine_memory_ = false;
};

class Stream final : public GroupStream {
 public:
  Stream(Source& source, nb::object iterator) : source_(source), iterator_(std::move(iterator)) {}
  ~Stream() override {
    const nb::gil_scoped_acquire gil;
    try {
      if (nb::hasattr(iterator_, "close")) iterator_.attr("close")();
    } catch (nb::python_error& error) {
      source_.engine_.keep(std::move(error)).ignore();
    }
    held_.clear();
    iterator_.reset();
  }

  Result<std::optional<GroupTensors>> next() override {
    const nb::gil_scoped_acquire gil;
    try {
      return take();
    } catch (nb::python_error& error) {
      return source_.engine_.keep(std::move(error));
    }
  }

  void released(std::uint32_t group) override {
    const nb::gil_scoped_acquire gil;
    held_.erase(group);
    try {
      source_.source_.attr("released")(group);
    } catch (nb::python_error& error) {
      source_.engine_.keep(std::move(error)).ignore();
    }
  }

 private:
  std::optional<GroupTensors> take() {
    const nb::object item = nb::steal(PyIter_Next(iterator_.ptr()));
    if (!item.is_valid()) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
      return std::nullopt;
    }
    GroupTensors out;
    out.group = number_of(item.attr("group"), "GroupTensors.group");
    std::vector<View>& held = held_[out.group];
    for (nb::handle entry : nb::object(item.attr("tensors"))) {
      NamedView named;
      named.name = number_of(entry.attr("name"), "NamedView.name");
      named.piece = number_of(entry.attr("piece"), "NamedView.piece");
      const nb::object tensor = entry.attr("view");
      if (!tensor.is_none()) {
        const bool known = named.name < source_.metadata_.size();
        held.push_back(view_of(tensor, known ? "the tensor '" + source_.metadata_[named.name].name + "'"
                                             : "the tensor of name " + std::to_string(named.name)));
        named.view = held.back().view;
      }
      out.tensors.push_back(std::move(named));
    }
    return out;
  }

  Source& source_;
  nb::object iterator_;
  std::map<std::uint32_t, std::vector<View>> held_;  // by group
};

Result<std::unique_ptr<GroupStream>> Source::iter_groups(const SyncRequest& request) {
  const nb::gil_scoped_acquire gil;
  try {
    const nb::object iterable = source_.attr("iter_groups")(nb::cast(request));
    nb::object iterator = nb::steal(PyObject_GetIter(iterable.ptr()));
    if (!iterator.is_valid()) throw nb::python_error();
    return std::unique_ptr<GroupStream>(std::make_unique<Stream>(*this, std::move(iterator)));
  } catch (nb::python_error& error) {
    return engine_.keep(std::move(error));
  }
}

nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>> array_of(const EngineMemory& memory) {
  auto* const keeper = new std::shared_ptr<void>(memory.owner);
  const nb::capsule owner(keeper,
                          [](void* held) noexcept { delete static_cast<std::shared_ptr<void>*>(held); });
  const std::size_t shape[] = {memory.bytes};
  return nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>(
      memory.data, 1, shape, owner, nullptr, nb::dtype<std::uint8_t>(), nb::device::cpu::value);
}

class TrainerHandle final : public Engine {
 public:
  explicit TrainerHandle(const nb::dict& given) : TrainerHandle(trainer_options(given)) {}
  ~TrainerHandle() override { shutdown("the trainer has finished", std::nullopt); }

  void init(nb::handle source) {
    if (source_)
      check(Status(StatusCode::kFailedPrecondition, "init is called once, before shutdown",
                   {.reason = Reason::kWrongState}),
            process());
    source_ = std::make_unique<Source>(*this, source);
    check(blocking("init", [&] { return trainer_->init(*source_); }), process());
  }
  SyncReport send_weights(nb::handle version, nb::handle names) {
    const std::uint64_t number = unsigned_of(version, "version");
    SendOptions options;
    if (!names.is_none()) {
      if (PyUnicode_Check(names.ptr())) raise_type("names", "a sequence of patterns", names);
      for (nb::handle name : names) options.names.push_back(text_of(name, "names[...]"));
    }
    return check(blocking("send_weights", [&] { return trainer_->send_weights(number, options); }),
                 process());
  }
  nb::tuple next_sync() {
    NextSync next = check(blocking("next_sync", [&] { return trainer_->next_sync(); }), process());
    return nb::make_tuple(next.version, nb::tuple(nb::cast(next.names)));
  }
  bool returned() { return trainer_->returned(); }
  nb::bytes worker_init_payload() {
    const std::vector<std::byte> bytes = check(trainer_->worker_init_payload(), process());
    return nb::bytes(bytes.data(), bytes.size());
  }
  nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>> allocate(nb::handle bytes, nb::handle what) {
    const std::uint64_t size = unsigned_of(bytes, "bytes");
    const std::string name = text_of(what, "what");
    return array_of(check(blocking("allocate", [&] { return trainer_->allocate(size, name); }), process()));
  }
  void send_message(nb::handle to, nb::handle topic, nb::handle body) {
    check(trainer_->send_message(text_of(to, "to"), text_of(topic, "topic"), text_of(body, "body")),
          process());
  }
  nb::object receive_message(nb::handle timeout_ms) {
    const std::uint64_t limit = unsigned_of(timeout_ms, "timeout_ms");
    const auto message =
        check(blocking("receive_message", [&] { return trainer_->receive_message(limit); }), process());
    return message ? nb::object(nb::make_tuple(message->from, message->topic, message->body)) : nb::none();
  }
  std::uint64_t engine_bytes() { return trainer_->engine_bytes(); }
  void shutdown(const std::string& reason, const std::optional<std::string>& why) {
    if (!trainer_) return;
    {
      const std::lock_guard lock(goodbye_mutex_);
      if (goodbye_.empty()) {
        goodbye_ = reason;
        if (why) failure_ = Status(StatusCode::kAborted, *why);
      }
    }
    close([this] { stop(); });
  }

 private:
  explicit TrainerHandle(TrainerOptions options) : Engine("trainer " + std::to_string(options.rank)) {
    options.fleet.interrupt = [this] { return interrupt(); };
    trainer_ = check(blocking("Trainer", [&] { return Trainer::create(options); }), process());
  }
  void stop() override {
    std::string reason;
    Status failure;
    {
      const std::lock_guard lock(goodbye_mutex_);
      reason = goodbye_;
      failure = failure_;
    }
    if (failure.ok()) {
      trainer_->shutdown(reason);
    } else {
      trainer_->shutdown(failure);
    }
  }

  std::unique_ptr<Source> source_;
  std::unique_ptr<Trainer> trainer_;
  std::mutex goodbye_mutex_;
  std::string goodbye_;
  Status failure_;
};

class WorkerHandle final : public Engine {
 public:
  WorkerHandle(ModelHandle& model, const nb::dict& given) : WorkerHandle(model, worker_options(given)) {}
  ~WorkerHandle() override { shutdown(); }

  // `on_sync`: callable(version, error or None, report), or None.
  void serve(nb::handle on_sync) {
    if (!on_sync.is_none() && PyCallable_Check(on_sync.ptr()) == 0)
      raise_type("on_sync", "callable", on_sync);
    const auto call = [&](std::uint64_t version, const Status& status, const WorkerReport& report) {
      const nb::gil_scoped_acquire gil;
      if (failed_) return;
      try {
        on_sync(version, status.ok() ? nb::none() : error_of(status, process()), report);
      } catch (nb::python_error& error) {
        failed_ = true;
        keep(std::move(error)).ignore();
      }
    };
    failed_ = false;
    const Status served =
        blocking("serve", [&] { return on_sync.is_none() ? worker_->serve() : worker_->serve(call); });
    if (!closing()) check(served, process());
  }
  std::uint64_t version() { return check(worker_->version(), process()); }
  std::uint64_t module_version(nb::handle module) {
    return check(worker_->module_version(text_of(module, "module")), process());
  }
  std::uint64_t version_guard() { return worker_->version_guard().load(std::memory_order_acquire); }
  std::uint64_t engine_bytes() { return worker_->engine_bytes(); }
  std::string plan_summary() { return worker_->plan_summary(); }
  void send_message(nb::handle to, nb::handle topic, nb::handle body) {
    check(worker_->send_message(text_of(to, "to"), text_of(topic, "topic"), text_of(body, "body")),
          process());
  }
  void shutdown() {
    if (worker_) close([this] { stop(); });
  }

 private:
  WorkerHandle(ModelHandle& model, WorkerOptions options)
      : Engine("worker " + std::to_string(options.consumer)), model_(model) {
    if (model.users != 0)
      check(Status(StatusCode::kFailedPrecondition, "model: another worker writes into it",
                   {.reason = Reason::kWrongState}),
            process());
    options.fleet.interrupt = [this] { return interrupt(); };
    ++model_.users;
    try {
      auto connected = blocking("Worker", [&] { return Worker::connect(options, *model.model); });
      if (!connected.ok()) rethrow_raised(model);
      worker_ = check(std::move(connected), process());
    } catch (...) {
      --model_.users;
      throw;
    }
  }
  void stop() override {
    worker_->shutdown();
    --model_.users;
  }

  ModelHandle& model_;  // the Python Worker owns it
  std::unique_ptr<Worker> worker_;
  bool failed_ = false;  // on_sync raised
};

void bind_reports(nb::module_& module) {
  nb::class_<PhaseTime>(module, "PhaseTime")
      .def_prop_ro("phase", [](const PhaseTime& self) { return std::string(to_string(self.phase)); })
      .def_ro("charged_ns", &PhaseTime::charged_ns)
      .def_ro("active_ns", &PhaseTime::active_ns)
      .def_ro("count", &PhaseTime::count);
  nb::class_<WorkerReport>(module, "WorkerReport")
      .def_ro("consumer", &WorkerReport::consumer)
      .def_ro("bytes_kept", &WorkerReport::bytes_kept)
      .def_ro("bytes_moved", &WorkerReport::bytes_moved)
      .def_ro("update_ns", &WorkerReport::update_ns)
      .def_ro("copy_ns", &WorkerReport::copy_ns)
      .def_ro("padding_bytes", &WorkerReport::padding_bytes)
      .def_ro("rerouted_pulls", &WorkerReport::rerouted_pulls)
      .def_ro("fallback_names", &WorkerReport::fallback_names)
      .def_ro("commit_ns", &WorkerReport::commit_ns)
      .def_ro("phases", &WorkerReport::phases)
      .def_ro("waited_for", &WorkerReport::waited_for)
      .def_ro("waited_ns", &WorkerReport::waited_ns);
  nb::class_<RankReport>(module, "RankReport")
      .def_ro("rank", &RankReport::rank)
      .def_ro("export_ns", &RankReport::export_ns)
      .def_ro("export_bytes", &RankReport::export_bytes)
      .def_ro("peak_resident_bytes", &RankReport::peak_resident_bytes)
      .def_ro("packs", &RankReport::packs)
      .def_ro("packed_bytes", &RankReport::packed_bytes)
      .def_ro("wall_ns", &RankReport::wall_ns)
      .def_ro("phases", &RankReport::phases);
  nb::class_<SyncReport>(module, "SyncReport")
      .def_ro("sync_id", &SyncReport::sync_id)
      .def_ro("version", &SyncReport::version)
      .def_ro("wall_ns", &SyncReport::wall_ns)
      .def_ro("workers", &SyncReport::workers)
      .def_ro("ranks", &SyncReport::ranks)
      .def_ro("lost_consumers", &SyncReport::lost_consumers)
      .def_ro("dropped_consumers", &SyncReport::dropped_consumers)
      .def_ro("lost_ranks", &SyncReport::lost_ranks)
      .def("__str__", [](const SyncReport& self) { return summary_line(self); });
  nb::class_<SyncRequest>(module, "SyncRequest")
      .def_ro("sync_id", &SyncRequest::sync_id)
      .def_ro("version", &SyncRequest::version)
      .def_ro("groups", &SyncRequest::groups)
      .def_ro("names", &SyncRequest::names);
}

}  // namespace

void bind_fleet(nb::module_& module) {
  bind_reports(module);
  nb::class_<TrainerHandle>(module, "Trainer")
      .def(nb::init<const nb::dict&>(), nb::arg("options"))
      .def("init", &TrainerHandle::init, nb::arg("source").none())
      .def("returned", &TrainerHandle::returned)
      .def("worker_init_payload", &TrainerHandle::worker_init_payload)
      .def("send_weights", &TrainerHandle::send_weights, nb::arg("version").none(), nb::arg("names").none())
      .def("next_sync", &TrainerHandle::next_sync)
      .def("allocate", &TrainerHandle::allocate, nb::arg("bytes").none(), nb::arg("what").none())
      .def("send_message", &TrainerHandle::send_message, nb::arg("to").none(), nb::arg("topic").none(),
           nb::arg("body").none())
      .def("receive_message", &TrainerHandle::receive_message, nb::arg("timeout_ms").none())
      .def("engine_bytes", &TrainerHandle::engine_bytes)
      .def(
          "shutdown",
          [](TrainerHandle& self, nb::handle reason, nb::handle why) {
            self.shutdown(text_of(reason, "reason"),
                          why.is_none() ? std::nullopt : std::optional(text_of(why, "why")));
          },
          nb::arg("reason").none(), nb::arg("why").none());
  nb::class_<WorkerHandle>(module, "Worker")
      .def(nb::init<ModelHandle&, const nb::dict&>(), nb::arg("model"), nb::arg("options"),
           nb::keep_alive<1, 2>())
      .def("serve", &WorkerHandle::serve, nb::arg("on_sync").none())
      .def("version", &WorkerHandle::version)
      .def("module_version", &WorkerHandle::module_version, nb::arg("module").none())
      .def("version_guard", &WorkerHandle::version_guard)
      .def("engine_bytes", &WorkerHandle::engine_bytes)
      .def("plan_summary", &WorkerHandle::plan_summary)
      .def("send_message", &WorkerHandle::send_message, nb::arg("to").none(), nb::arg("topic").none(),
           nb::arg("body").none())
      .def("shutdown", &WorkerHandle::shutdown);
  module.def(
      "allocate",
      [](nb::handle bytes, nb::handle what) {
        return array_of(check(Worker::allocate(unsigned_of(bytes, "bytes"), text_of(what, "what"))));
      },
      nb::arg("bytes").none(), nb::arg("what").none());
}

}  // namespace shardpull::python
