dnl --with-cuda[=DIR]: owned by kernels/cuda. Never guessed into a silent downgrade: the summary says what was found.
AC_ARG_WITH([cuda], [AS_HELP_STRING([--with-cuda@<:@=DIR@:>@], [build the CUDA backend (default: no)])], [], [with_cuda=no])
skv_cuda_summary="no"
AS_IF([test "x$with_cuda" != xno], [AC_MSG_ERROR([this tree has no CUDA backend yet])])
