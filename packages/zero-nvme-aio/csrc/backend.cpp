// The table of backends, in the order in which "auto" tries them.
#include "op.h"

namespace zaio {

std::unique_ptr<Backend> make_backend(const BackendConfig& config) {
    if (config.name == "io_uring") return make_uring_backend(config);
    if (config.name == "libaio") return make_libaio_backend(config);
    if (config.name == "threads") return make_threads_backend(config);
    if (config.name == "null") return make_null_backend(config);
    throw Unavailable(EINVAL, "no backend is called '" + config.name + "' (io_uring, libaio, threads, null)");
}

}  // namespace zaio
