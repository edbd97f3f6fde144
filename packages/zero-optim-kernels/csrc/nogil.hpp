// Releases the GIL while a kernel runs, also when the interpreter ends meanwhile.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace zok {

// Releases the GIL until the end of its scope.
//
// A daemon thread that wants the GIL back while the interpreter ends never gets it. Python 3.14 lets such a thread sleep. Older versions end
// it by pthread_exit, which unwinds the stack through this destructor. No exception may leave a destructor: the process would abort with
// "terminate called without an active exception". So the unwinding stops here, and the thread sleeps until the process ends.
class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
#if defined(__GLIBCXX__)
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            for (;;) ::pause();
        }
#else
        PyEval_RestoreThread(state_);
#endif
    }

private:
    PyThreadState* state_;
};

}  // namespace zok
