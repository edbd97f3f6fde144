// The only file that knows Python. Buffers are held here, under the GIL, until the kernel is done with them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sys/eventfd.h>

#include <list>

#include "checksum.h"
#include "copy.h"
#include "dlpack_abi.h"
#include "engine.h"
#include "fault.h"
#include "memory.h"
#include "nogil.h"

namespace py = pybind11;
using namespace zaio;

namespace {

// A Python object whose memory is in use. Every member needs the GIL.
class Held {
public:
    explicit Held(py::object owner) : owner_(std::move(owner)) {}
    Held(PyObject* exporter, bool writable) {
        const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(exporter, &view_, flags) != 0) throw py::error_already_set();
        exported_ = true;
    }
    Held(Held&& other) noexcept : owner_(std::move(other.owner_)), view_(other.view_), exported_(other.exported_) {
        other.exported_ = false;
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        if (exported_) PyBuffer_Release(&view_);
    }
    Segment segment() const { return {static_cast<char*>(view_.buf), static_cast<uint64_t>(view_.len)}; }

private:
    py::object owner_;
    Py_buffer view_{};
    bool exported_ = false;
};

// Whether this is a torch tensor whose storage its owner can resize; memory that exports a buffer cannot be.
bool may_be_resized(const py::handle owner) {
    if (!py::hasattr(owner, "untyped_storage")) return false;
    return owner.attr("untyped_storage")().attr("resizable")().cast<bool>();
}

// Requests that nobody waits for any more; their memory stays until the kernel is done. Touched under the GIL only.
struct Orphans {
    struct Entry {
        std::shared_ptr<Request> request;
        std::vector<Held> held;
    };
    std::list<Entry> entries;

    void sweep() {
        for (auto entry = entries.begin(); entry != entries.end();) {
            entry = entry->request->done() ? entries.erase(entry) : std::next(entry);
        }
    }
};

class PyRequest {
public:
    PyRequest(std::shared_ptr<Request> request, std::vector<Held> held, std::shared_ptr<Orphans> orphans)
        : request_(std::move(request)), held_(std::move(held)), orphans_(std::move(orphans)) {}
    ~PyRequest() {
        if (!request_->done()) orphans_->entries.push_back({request_, std::move(held_)});
    }

    bool done() {
        const bool done = request_->done();
        if (done) held_.clear();
        return done;
    }

    // Returns whether it is done. Sleeps in slices so that Ctrl-C gets through.
    bool wait(double timeout_seconds) {
        using Seconds = std::chrono::duration<double>;
        const bool forever = timeout_seconds < 0;
        const auto start = std::chrono::steady_clock::now();
        while (!request_->done()) {
            double slice = 0.1;
            if (!forever) {
                const double left = timeout_seconds - Seconds(std::chrono::steady_clock::now() - start).count();
                if (left <= 0) break;
                slice = std::min(slice, left);
            }
            {
                const WithoutGil without_gil;
                request_->wait_for(std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(slice)));
            }
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
        return done();
    }

    py::object failure() const {
        const Failure failure = request_->failure();
        if (!failure) return py::none();
        return py::make_tuple(failure.error, failure.offset, failure.expected, failure.got);
    }

    py::object checksum() const {
        if (request_->checksum() == nullptr || !request_->done()) return py::none();
        return py::int_(request_->checksum()->digest());
    }

    std::shared_ptr<Request> request_;

private:
    std::vector<Held> held_;
    std::shared_ptr<Orphans> orphans_;
};

class PyEngine {
public:
    PyEngine(const std::string& backend, uint32_t queue_depth, uint32_t block_bytes, uint32_t threads, bool single_submit,
             bool overlap_events, std::shared_ptr<FaultPlan> faults) {
        EngineConfig config{backend, queue_depth, block_bytes, threads, single_submit, overlap_events, std::move(faults)};
        const WithoutGil without_gil;
        engine_ = std::make_unique<Engine>(config);
    }
    ~PyEngine() { close(); }

    std::shared_ptr<File> open(const std::string& path, const OpenOptions& options) {
        const WithoutGil without_gil;
        return engine_->open(path, options);
    }

    void release(const std::shared_ptr<File>& file) {
        const WithoutGil without_gil;
        engine_->release(file);
    }

    // `items`: buffers, or (address, nbytes, owner) triples for memory that does not export a buffer.
    std::unique_ptr<PyRequest> submit(bool write, const std::shared_ptr<File>& file, const py::sequence& items, uint64_t offset,
                                      bool checksum) {
        orphans_->sweep();
        std::vector<Held> held;
        std::vector<Segment> segments;
        for (const py::handle item : items) {
            if (PyTuple_Check(item.ptr())) {
                const auto triple = py::reinterpret_borrow<py::tuple>(item);
                const auto address = triple[0].cast<uintptr_t>();
                segments.push_back(
                    {reinterpret_cast<char*>(address), triple[1].cast<uint64_t>(), may_be_resized(triple[2])});
                held.emplace_back(py::reinterpret_borrow<py::object>(triple[2]));
            } else {
                held.emplace_back(item.ptr(), !write);
                segments.push_back(held.back().segment());
            }
        }
        const OpKind kind = write ? OpKind::write : OpKind::read;
        auto request = engine_->submit(kind, file, std::move(segments), offset, checksum);
        return std::make_unique<PyRequest>(std::move(request), std::move(held), orphans_);
    }

    void cancel(PyRequest& request) { engine_->cancel(*request.request_); }

    py::object sync(const std::shared_ptr<File>& file) {
        Failure failure;
        {
            const WithoutGil without_gil;
            failure = engine_->sync(*file);
        }
        orphans_->sweep();
        if (!failure) return py::none();
        return py::make_tuple(failure.error, failure.offset, failure.expected, failure.got);
    }

    void close() {
        {
            const WithoutGil without_gil;
            engine_->close();
        }
        orphans_->sweep();
    }

    py::dict counters() const {
        const Counters& c = engine_->counters();
        py::dict out;
        out["bytes_read"] = c.bytes_read.load();
        out["bytes_written"] = c.bytes_written.load();
        out["zero_copy_bytes"] = c.zero_copy_bytes.load();
        out["staged_bytes"] = c.staged_bytes.load();
        out["buffered_bytes"] = c.buffered_bytes.load();
        out["blocks"] = c.blocks.load();
        out["continued"] = c.continued.load();
        out["staging_bytes"] = c.staging_bytes.load();
        out["registered_bytes"] = c.registered_bytes.load();
        return out;
    }

    const Engine& engine() const { return *engine_; }

private:
    std::unique_ptr<Engine> engine_;
    std::shared_ptr<Orphans> orphans_ = std::make_shared<Orphans>();
};

py::list attempt_list(const std::vector<Attempt>& attempts) {
    py::list out;
    for (const Attempt& attempt : attempts) out.append(py::make_tuple(attempt.name, attempt.reason, attempt.error));
    return out;
}

[[noreturn]] void raise_os_error(int error, const std::string& what) {
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error, what).ptr());
    throw py::error_already_set();
}

void bind_engine(py::module_& m) {
    py::class_<File, std::shared_ptr<File>>(m, "File")
        .def_property_readonly("path", &File::path)
        .def_property_readonly("direct", &File::direct)
        .def_property_readonly("direct_reason", &File::direct_reason)
        .def_property_readonly("memory_alignment", &File::memory_alignment)
        .def_property_readonly("granularity", &File::granularity)
        .def("size", &File::size, py::call_guard<WithoutGil>());

    py::class_<PyRequest>(m, "Request")
        .def("done", &PyRequest::done)
        .def("wait", &PyRequest::wait, py::arg("timeout_seconds"))
        .def("failure", &PyRequest::failure)
        .def("checksum", &PyRequest::checksum)
        .def("nbytes", [](const PyRequest& r) { return r.request_->nbytes(); })
        .def("times", [](const PyRequest& r) {
            return py::make_tuple(r.request_->started_at().count(), r.request_->ended_at().count());
        })
        .def("notify", [](const PyRequest& r, int fd) { return r.request_->notify(fd); })
        .def("forget_notify", [](const PyRequest& r, int fd) { r.request_->forget_notify(fd); });

    py::class_<PyEngine>(m, "Engine")
        .def(py::init<const std::string&, uint32_t, uint32_t, uint32_t, bool, bool, std::shared_ptr<FaultPlan>>(),
             py::arg("backend"), py::arg("queue_depth"), py::arg("block_bytes"), py::arg("threads"), py::arg("single_submit"),
             py::arg("overlap_events"), py::arg("faults"))
        .def("open",
             [](PyEngine& engine, const std::string& path, bool readable, bool writable, bool create, bool truncate, int direct,
                uint32_t block_bytes, uint32_t queue_depth, bool preallocate) {
                 OpenOptions options{readable,    writable,    create,     truncate, static_cast<Direct>(direct),
                                     block_bytes, queue_depth, preallocate};
                 return engine.open(path, options);
             })
        .def("release", &PyEngine::release)
        .def("submit", &PyEngine::submit)
        .def("cancel", &PyEngine::cancel)
        .def("sync", &PyEngine::sync)
        .def("close", &PyEngine::close)
        .def("closed", [](const PyEngine& e) { return e.engine().closed(); })
        .def("forked", [](const PyEngine& e) { return e.engine().forked(); })
        .def("backend", [](const PyEngine& e) { return e.engine().backend(); })
        .def("attempts", [](const PyEngine& e) { return attempt_list(e.engine().attempts()); })
        .def("threads", [](const PyEngine& e) { return e.engine().threads(); })
        .def("capabilities", [](const PyEngine& e) { return e.engine().capabilities(); })
        .def("counters", &PyEngine::counters);
}

// Taking gigabytes back costs the kernel tens of milliseconds.
struct DeleteWithoutGil {
    void operator()(Mapping* mapping) const {
        const WithoutGil without_gil;
        delete mapping;
    }
};
using MappingHolder = std::unique_ptr<Mapping, DeleteWithoutGil>;

void bind_memory(py::module_& m) {
    py::class_<Mapping, MappingHolder>(m, "Mapping", py::buffer_protocol())
        .def(py::init([](size_t nbytes, bool huge_pages, bool lock) {
            const WithoutGil without_gil;
            return MappingHolder(new Mapping(nbytes, MappingOptions{huge_pages, lock}));
        }))
        .def_property_readonly("address", [](const Mapping& mapping) { return reinterpret_cast<uintptr_t>(mapping.data()); })
        .def_property_readonly("nbytes", &Mapping::nbytes)
        .def_property_readonly("charged_bytes", &Mapping::charged_bytes)
        .def_property_readonly("resident_bytes", &Mapping::resident_bytes)
        .def_property_readonly("locked", &Mapping::locked)
        .def_buffer([](Mapping& mapping) {
            return py::buffer_info(reinterpret_cast<unsigned char*>(mapping.data()), static_cast<py::ssize_t>(mapping.nbytes()));
        });
    m.def("pin_limit", &PinAllowance::limit);
    m.def("pinned_bytes", &PinAllowance::in_use);
    m.def("page_bytes", &page_bytes);
    m.def("checksum", [](const py::buffer& data) {
        Held held(data.ptr(), false);
        const Segment segment = held.segment();
        const WithoutGil without_gil;
        return Checksum::of(segment.address, segment.nbytes);
    });
    m.def("checksum_at", [](uintptr_t address, uint64_t nbytes) {
        const WithoutGil without_gil;
        return Checksum::of(reinterpret_cast<const void*>(address), nbytes);
    });
    m.def("copy_memory", [](const py::buffer& target, const py::buffer& source) {
        Held to(target.ptr(), true), from(source.ptr(), false);
        const Segment goal = to.segment(), origin = from.segment();
        if (goal.nbytes != origin.nbytes) {
            throw py::value_error("expected as many bytes in the target as in the source, got " +
                                  std::to_string(goal.nbytes) + " and " + std::to_string(origin.nbytes));
        }
        const WithoutGil without_gil;
        copy_past_caches(static_cast<char*>(goal.address), static_cast<const char*>(origin.address), goal.nbytes);
    });
    m.def("copy_memories", [](const py::sequence& targets, const py::sequence& sources) {
        if (targets.size() != sources.size()) {
            throw py::value_error("expected as many targets as sources, got " + std::to_string(targets.size()) +
                                  " and " + std::to_string(sources.size()));
        }
        std::vector<Held> held;
        std::vector<std::pair<Segment, Segment>> copies;
        for (size_t i = 0; i < targets.size(); ++i) {
            const py::object target = targets[i], source = sources[i];
            held.emplace_back(target.ptr(), true);
            const Segment goal = held.back().segment();
            held.emplace_back(source.ptr(), false);
            const Segment origin = held.back().segment();
            if (goal.nbytes != origin.nbytes) {
                throw py::value_error("expected as many bytes in target " + std::to_string(i) +
                                      " as in its source, got " + std::to_string(goal.nbytes) + " and " +
                                      std::to_string(origin.nbytes));
            }
            copies.emplace_back(goal, origin);
        }
        const WithoutGil without_gil;
        for (const auto& [goal, origin] : copies) {
            copy_past_caches(static_cast<char*>(goal.address), static_cast<const char*>(origin.address), goal.nbytes);
        }
    });
}

// (address, nbytes, C-contiguous, read-only) of a DLPack capsule, which keeps owning the memory.
py::tuple describe_dlpack(const py::capsule& capsule) {
    const dlpack::Tensor* tensor = nullptr;
    bool read_only = false;
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
        const auto* managed = static_cast<const dlpack::Versioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
        if (managed->major != 1) throw py::value_error("the DLPack capsule has a major version other than 1");
        tensor = &managed->tensor;
        read_only = (managed->flags & dlpack::kReadOnly) != 0;
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
        tensor = static_cast<const dlpack::Tensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    } else {
        throw py::value_error("not an unused DLPack capsule");
    }
    const auto address = reinterpret_cast<uintptr_t>(tensor->data) + tensor->byte_offset;
    return py::make_tuple(address, dlpack::nbytes(*tensor), dlpack::c_contiguous(*tensor), read_only);
}

void bind_faults(py::module_& m) {
    py::class_<FaultPlan, std::shared_ptr<FaultPlan>>(m, "FaultPlan")
        .def(py::init([](const py::list& rules) {
            std::vector<FaultRule> native;
            for (const py::handle item : rules) {
                const auto rule = item.cast<py::dict>();
                native.push_back({static_cast<FaultAction>(rule["action"].cast<int>()), rule["on_read"].cast<bool>(),
                                  rule["on_write"].cast<bool>(), rule["on_sync"].cast<bool>(), rule["first"].cast<uint64_t>(),
                                  rule["every"].cast<uint64_t>(), rule["limit"].cast<uint64_t>(),
                                  rule["min_offset"].cast<uint64_t>(), rule["error"].cast<int>(),
                                  rule["fraction"].cast<double>(), rule["delay_us"].cast<uint64_t>(),
                                  rule["seed"].cast<uint64_t>()});
            }
            return std::make_shared<FaultPlan>(std::move(native));
        }))
        .def("fired", &FaultPlan::fired);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const OpenError& error) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(error.error, error.what()).ptr());
        } catch (const Unavailable& error) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(error.error, error.what()).ptr());
        } catch (const EngineGone& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        } catch (const std::system_error& error) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
        }
    });
    bind_engine(m);
    bind_memory(m);
    bind_faults(m);
    m.def("probe_backends", [] {
        std::vector<Attempt> attempts;
        {
            const WithoutGil without_gil;
            attempts = probe_backends();
        }
        return attempt_list(attempts);
    });
    m.def("probe_registration", [] {
        const WithoutGil without_gil;
        const Registration registration = probe_registration();
        return std::make_pair(registration.nbytes, registration.error);
    });
    m.def("describe_dlpack", &describe_dlpack);
    m.attr("END_OF_FILE") = kEndOfFile;
    m.attr("CANCELLED") = kCancelled;
    m.def("eventfd", [] {
        const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (fd < 0) raise_os_error(errno, "eventfd");
        return fd;
    });
}
