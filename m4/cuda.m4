dnl --with-cuda[=DIR]: the CUDA backend. Found by itself where nvcc is; asked for and missing is an error; what was
dnl found is said in the summary. Sanitizer builds leave it out unless asked: ASan and the CUDA driver want the same
dnl addresses. Variables: NVCC CUDA_DIR CUDA_CPPFLAGS CUDA_LIBS CUDA_ARCHS, conditionals HAVE_CUDA HAVE_NVCC HAVE_NCCL.
AC_ARG_WITH([cuda],
  [AS_HELP_STRING([--with-cuda@<:@=DIR@:>@], [build the CUDA backend, with the toolkit in DIR (default: where nvcc is found)])],
  [], [with_cuda=auto])
AC_ARG_WITH([cuda-archs],
  [AS_HELP_STRING([--with-cuda-archs=LIST], [compute capabilities that get machine code (default: "80 90"; newer devices compile the last one's PTX)])],
  [], [with_cuda_archs="80 90"])
AC_ARG_VAR([NVCC], [the CUDA compiler])
skv_cuda=no
skv_cuda_summary=no
skv_nccl=no
AS_IF([test "x$with_cuda" != xno], [
  AS_CASE([$with_cuda],
    [auto|yes], [AC_PATH_PROG([NVCC], [nvcc], [], [$PATH$PATH_SEPARATOR/usr/local/cuda/bin])],
    [AS_IF([test -x "$with_cuda/bin/nvcc"], [NVCC=$with_cuda/bin/nvcc])])
  AS_IF([test -n "$NVCC"], [
    CUDA_DIR=`readlink -f "$NVCC"`
    CUDA_DIR=`dirname "$CUDA_DIR"`
    CUDA_DIR=`dirname "$CUDA_DIR"`
    skv_cuda_missing=
    for skv_header in cuda_runtime_api.h cublas_v2.h; do
      AS_IF([test -r "$CUDA_DIR/include/$skv_header"], [], [skv_cuda_missing="$skv_cuda_missing $skv_header"])
    done
    CUDA_LIB=$CUDA_DIR/lib64
    AS_IF([test -d "$CUDA_LIB"], [], [CUDA_LIB=$CUDA_DIR/lib])
    for skv_lib in libcudart_static.a libcublas.so; do
      AS_IF([test -r "$CUDA_LIB/$skv_lib"], [], [skv_cuda_missing="$skv_cuda_missing $skv_lib"])
    done
    AS_IF([test -z "$skv_cuda_missing"], [skv_cuda=yes],
      [skv_cuda_summary="no ($NVCC is there, but not:$skv_cuda_missing)"])
    AS_IF([test $skv_cuda = yes], [
      AC_MSG_CHECKING([whether $NVCC compiles for this C++ compiler and sm $with_cuda_archs])
      skv_gencode=
      for skv_arch in $with_cuda_archs; do
        skv_gencode="$skv_gencode -gencode arch=compute_$skv_arch,code=sm_$skv_arch"
      done
      echo '__global__ void f(int *p) { *p = 1; } void g(int *p) { f<<<1, 1>>>(p); }' >conftest.cu
      AS_IF([$NVCC -std=c++17 $skv_gencode -c -o conftest.o conftest.cu >&AS_MESSAGE_LOG_FD 2>&1],
        [AC_MSG_RESULT([yes])],
        [AC_MSG_RESULT([no])
         skv_cuda=no
         skv_cuda_summary="no ($NVCC is there, but does not compile a kernel: see config.log)"])
      rm -f conftest.cu conftest.o
    ])
    AS_IF([test -r "$CUDA_DIR/include/nccl.h" && test -r "$CUDA_LIB/libnccl.so"], [skv_nccl=yes])
  ], [skv_cuda_summary="no (no nvcc)"])
  AS_IF([test "x$with_cuda" != xauto && test $skv_cuda = no],
    [AC_MSG_ERROR([--with-cuda was given, but the toolkit is not complete: $skv_cuda_summary])])
], [skv_cuda_summary="no (--without-cuda)"])
AM_CONDITIONAL([HAVE_NVCC], [test $skv_cuda = yes])
AS_IF([test $skv_cuda = yes && test "x$with_cuda" = xauto && test -n "$SKV_SAN"], [
  skv_cuda=no
  skv_cuda_summary="no (a sanitizer build; --with-cuda to have it all the same)"])
AS_IF([test $skv_cuda = yes], [
  CUDA_LIBS="-L$CUDA_LIB -Wl,-rpath,$CUDA_LIB -lcublas"
  AS_IF([test $skv_nccl = yes], [CUDA_LIBS="$CUDA_LIBS -lnccl"])
  CUDA_LIBS="$CUDA_LIBS -lcudart_static -lstdc++ -ldl -lrt"
  skv_cuda_summary="yes ($NVCC, sm: $with_cuda_archs, NCCL: $skv_nccl)"
  AC_DEFINE([SKV_CUDA], [1], [The CUDA backend is in this build])])
CUDA_CPPFLAGS="-I$CUDA_DIR/include"
AS_IF([test $skv_nccl = yes], [CUDA_NCCL=-DSKV_NCCL], [CUDA_NCCL=])
CUDA_ARCHS=$with_cuda_archs
CUDA_GENCODE=
for skv_arch in $with_cuda_archs; do
  CUDA_GENCODE="$CUDA_GENCODE -gencode arch=compute_$skv_arch,code=sm_$skv_arch"
  skv_last=$skv_arch
done
CUDA_GENCODE="$CUDA_GENCODE -gencode arch=compute_$skv_last,code=compute_$skv_last"
AC_SUBST([CUDA_DIR])
AC_SUBST([CUDA_CPPFLAGS])
AC_SUBST([CUDA_NCCL])
AC_SUBST([CUDA_LIBS])
AC_SUBST([CUDA_ARCHS])
AC_SUBST([CUDA_GENCODE])
AM_CONDITIONAL([HAVE_CUDA], [test $skv_cuda = yes])
AM_CONDITIONAL([HAVE_NCCL], [test $skv_nccl = yes])
