#!/bin/sh
# Builds liblapis.so and liblapis.a and installs them with headers and a pkg-config file.
set -eu

usage() {
    cat <<'EOF'
usage: install.sh [--prefix DIR] [--destdir DIR] [--libdir DIR] [--profile PROFILE]

  --prefix   where it is used, /usr/local by default
  --destdir  where it is put instead, for packages
  --libdir   of the libraries, PREFIX/lib by default
  --profile  of cargo, release by default
EOF
}

prefix=/usr/local destdir='' libdir='' profile=release
while [ $# -gt 0 ]; do
    case $1 in
    --prefix | --destdir | --libdir | --profile)
        [ $# -gt 1 ] || { usage >&2; exit 2; }
        case $1 in
        --prefix) prefix=$2 ;;
        --destdir) destdir=$2 ;;
        --libdir) libdir=$2 ;;
        --profile) profile=$2 ;;
        esac
        shift 2
        ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
done
libdir=${libdir:-$prefix/lib}

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
[ "$profile" = dev ] && built=$target/debug || built=$target/$profile
(cd "$root" && "${CARGO:-cargo}" build --quiet --locked --target-dir "$target" --profile "$profile" -p lapis-c)

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
# Counts what breaks programs that were linked with an older release.
soversion=0
needs='-lpthread -ldl -lrt -lm -lgcc_s'

mkdir -p "$destdir$libdir/pkgconfig" "$destdir$prefix/include"
# cargo can't version symbols: rustc's own version script is in the way. So the archive is linked here.
# A library that programs are running with must not change under them, so another takes its place.
"${CC:-cc}" -shared -o "$destdir$libdir/.liblapis.so.new" \
    -Wl,--whole-archive "$built/liblapis_c.a" -Wl,--no-whole-archive \
    -Wl,-soname,liblapis.so.$soversion -Wl,--version-script="$here/liblapis.map" \
    -Wl,--gc-sections -Wl,-z,nodelete -Wl,-z,defs -Wl,-z,relro,-z,now $needs
mv "$destdir$libdir/.liblapis.so.new" "$destdir$libdir/liblapis.so.$version"
ln -sf "liblapis.so.$version" "$destdir$libdir/liblapis.so.$soversion"
ln -sf liblapis.so.$soversion "$destdir$libdir/liblapis.so"
install -m 644 "$built/liblapis_c.a" "$destdir$libdir/liblapis.a"
install -m 644 "$root/client-lib/include/lapis.h" "$root/client-lib/include/lapis.hpp" "$destdir$prefix/include"
sed -e "s|@prefix@|$prefix|" -e "s|@libdir@|$libdir|" -e "s|@version@|$version|" -e "s|@needs@|$needs|" \
    "$here/lapis.pc.in" >"$destdir$libdir/pkgconfig/lapis.pc"
chmod 644 "$destdir$libdir/pkgconfig/lapis.pc"
echo "liblapis $version is in $destdir$libdir, its headers in $destdir$prefix/include"
