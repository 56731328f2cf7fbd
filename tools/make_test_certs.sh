#!/bin/sh
# Makes the certificates of tests/service/certs anew. They are valid from 2020 to 2120 and guard nothing: their keys
# are public, as this repository is. Needs openssl.
set -eu
cd "$(dirname "$0")/../tests/service/certs"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -f ./*.pem ./*.key

: > "$work/index"
cat > "$work/ca.conf" <<END
[ca]
default_ca = this
[this]
database = $work/index
new_certs_dir = $work
rand_serial = yes
default_md = sha256
policy = names
unique_subject = no
[names]
commonName = supplied
END

sign() { # key, common name, file, end, extensions, then what signs
    key=$1 name=$2 file=$3 end=$4
    printf '%b' "$5" > "$work/extensions"
    shift 5
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$key"
    openssl req -new -key "$key" -subj "/CN=$name" -out "$work/request"
    openssl ca -config "$work/ca.conf" -batch -notext -in "$work/request" -out "$file" \
        -startdate 20200101000000Z -enddate "$end" -extfile "$work/extensions" "$@"
}

authority() { # name, common name; its key is not kept
    sign "$work/$1.key" "$2" "$1.pem" 21200101000000Z \
        'basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n' \
        -selfsign -keyfile "$work/$1.key"
}

certificate() { # name, common name, authority, alternative names, end
    sign "$1.key" "$2" "$1.pem" "$5" "basicConstraints=CA:FALSE\nsubjectAltName=$4\n" \
        -cert "$3.pem" -keyfile "$work/$3.key"
}

here=DNS:localhost,IP:127.0.0.1,IP:0:0:0:0:0:0:0:1
authority ca 'Penstock test authority'
authority other_ca 'Another test authority'
certificate server first ca $here 21200101000000Z
certificate renewed second ca $here 21200101000000Z
certificate expired expired ca $here 20210101000000Z
certificate client alice ca DNS:alice.example,URI:spiffe://example/alice,DNS:alice 21200101000000Z
certificate stranger mallory other_ca DNS:mallory.example 21200101000000Z
openssl pkey -in server.key -aes256 -passout pass:secret -out encrypted.key
